"""Which characters of a rendered conversation the assistant produced: by prefix rendering, never by searching the text.

For an assistant turn i, serving sends P = the render of the messages before it with the generation prompt, and the
render F of the messages up to it extends P by what the model produced. Turns whose F also begins a later turn's F share
that one sample (append-only templates); where the template rewrites history they become samples of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eagle3_data.builders.samples.encode import Cut
from eagle3_data.builders.samples.messages import Conversation, Message
from eagle3_data.builders.samples.spec import SampleSpec
from eagle3_data.builders.samples.template import ChatTemplate
from eagle3_data.errors import SampleError

THINK_FORMS = (("<think>\n", "\n</think>\n\n"), ("<think>", "</think>"))
"""Think blocks that generation prompts open, and how the model closes them (DeepSeek-R1, QwQ; DeepSeek-V3.1, Kimi)."""


class UnstableTemplate(SampleError):
    """The render with the answer does not begin with the prompt that serving sends."""

    reason = "unstable template"


class ReasoningLost(SampleError):
    """The template drops the reasoning of the very turn that should teach it."""

    reason = "reasoning lost"


class NothingToLearn(SampleError):
    """No assistant turn, or only empty ones."""

    reason = "nothing to learn"


@dataclass(frozen=True, slots=True)
class TurnText:
    """One assistant turn as serving sees it: `text[:cut.prompt]` is sent, `text[cut.prompt:]` comes back."""

    turn: int
    """Ordinal among the assistant turns, from 0."""
    text: str
    cut: Cut
    thinking: bool | None
    """Mode told to the template; None when it has no switch or none was asked for."""
    think_added: bool = False
    """An empty think block stands before the answer, which the row did not have and is not learnt."""


@dataclass(frozen=True, slots=True)
class SampleText:
    """Text of one sample-to-be with the spans to learn, in order."""

    turn: int | None
    """Last assistant turn, when the conversation became several samples."""
    text: str
    cuts: tuple[Cut, ...]

    def split(self, turns: tuple[int, ...]) -> list[SampleText]:
        """One sample per span: every prefix of an append-only text is the text of an earlier turn."""
        return [SampleText(turn, self.text[: cut.end], (cut,)) for turn, cut in zip(turns, self.cuts, strict=True)]


@dataclass(frozen=True, slots=True)
class ConversationTexts:
    samples: tuple[SampleText, ...]
    turns: tuple[TurnText, ...]
    empty_turns: int

    def turns_of(self, sample: SampleText) -> tuple[int, ...]:
        by_end = {turn.cut: turn.turn for turn in self.turns}
        return tuple(by_end[cut] for cut in sample.cuts)


class Masker:
    """Conversations to texts with spans, for one template and one spec."""

    def __init__(self, template: ChatTemplate, spec: SampleSpec) -> None:
        self.template, self.spec = template, spec

    def texts(self, conversation: Conversation) -> ConversationTexts:
        """Raises SampleError, whose `reason` the report counts by, when the conversation cannot become samples."""
        if self.spec.reasoning == "drop":
            conversation = conversation.without_reasoning()
        positions = conversation.assistant_turns
        if not positions:
            raise NothingToLearn("the conversation has no assistant turn")
        spoken = [(turn, at) for turn, at in enumerate(positions) if not conversation.messages[at].is_empty]
        if not spoken:
            raise NothingToLearn("every assistant turn is empty")
        if self.spec.loss == "last-turn":
            spoken = spoken[-1:]
        messages = self.template.messages(conversation)
        turns = tuple(self._turn(conversation, messages, turn, at) for turn, at in spoken)
        return ConversationTexts(group_turns(turns), turns, len(positions) - len(spoken))

    def prompt(self, conversation: Conversation, at: int, *, thinking: bool | None = None) -> str:
        """What serving sends to have message `at` answered."""
        kwargs = self.thinking_kwargs(thinking)
        messages = self.template.messages(conversation)[:at]
        return self.template.render(messages, generation=True, tools=conversation.tools, kwargs=kwargs)

    def thinking_kwargs(self, thinking: bool | None) -> Mapping[str, Any]:
        return {} if thinking is None else dict.fromkeys(self.template.thinking_switches, thinking)

    def thinking_of(self, turn: Message) -> bool | None:
        """The mode in which a turn was, or is to be, produced."""
        if self.spec.thinking == "template" or not self.template.thinking_switches:
            return None
        return bool(turn.reasoning) if self.spec.thinking == "auto" else self.spec.thinking == "on"

    def _turn(self, conversation: Conversation, messages: list[dict[str, Any]], turn: int, at: int) -> TurnText:
        message = conversation.messages[at]
        thinking = self.thinking_of(message)
        view = _TurnView(self.template, conversation.tools, self.thinking_kwargs(thinking), messages[:at], messages[at])
        prompt = view.prompt()
        found = self._with_reasoning(view, prompt, message) if message.reasoning else _without_reasoning(view, prompt)
        if self.spec.reasoning != "context" or not message.reasoning:
            found = replace(found, answer=found.think if not message.reasoning else 0)
        text = prompt + found.produced
        start = len(prompt) + found.answer
        return TurnText(turn, text, Cut(len(prompt), start, len(text)), thinking, think_added=found.think > 0)

    def _with_reasoning(self, view: _TurnView, prompt: str, message: Message) -> _Found:
        full, bare = view.answered(), view.answered(reasoning="")
        if full != bare and full.startswith(prompt):
            answer = self._answer_start(view, full) - len(prompt) if self.spec.reasoning == "context" else 0
            return _Found(full[len(prompt) :], max(answer, 0))
        opened = _opened_think(prompt)
        if full == bare and opened is not None:
            rest = _after_think(bare, prompt, *opened)
            if rest is not None:
                thought = message.reasoning.strip("\n") + opened[1]
                return _Found(thought + rest, len(thought))
        inline = view.answered(reasoning="", content=message.inline)
        if full == bare != inline and inline.startswith(prompt):
            start = len(_common_text(inline, view.answered(reasoning="", content=_other(message.inline, message.text))))
            return _Found(inline[len(prompt) :], max(start - len(prompt), 0))
        if full == bare:
            raise ReasoningLost(
                "the template drops the reasoning of the turn it should teach",
                next="set reasoning to 'drop', or use answers that the target wrote itself (eagle3-data synth)",
            )
        raise _unstable(prompt, full)

    def _answer_start(self, view: _TurnView, full: str) -> int:
        """Where the answer begins in a render with reasoning: where another answer's render departs from it."""
        content = str(view.message.get("content") or "")
        return len(_common_text(full, view.answered(content=_other(content, content))))


@dataclass(frozen=True, slots=True)
class _Found:
    """What the model produced after the prompt, and how much of it comes before the answer proper."""

    produced: str
    answer: int = 0
    think: int = 0
    """Characters of an empty think block put before an answer that has no reasoning."""


@dataclass(frozen=True, slots=True)
class _TurnView:
    """Renders of one assistant turn behind its history."""

    template: ChatTemplate
    tools: tuple[Mapping[str, Any], ...]
    kwargs: Mapping[str, Any]
    history: list[dict[str, Any]]
    message: dict[str, Any]

    def prompt(self) -> str:
        return self.template.render(self.history, generation=True, tools=self.tools, kwargs=self.kwargs)

    def answered(self, *, reasoning: str | None = None, content: str | None = None) -> str:
        message = dict(self.message)
        if reasoning == "":
            message.pop(self.template.reasoning_field, None)
        if content is not None:
            message["content"] = content
        return self.template.render([*self.history, message], generation=False, tools=self.tools, kwargs=self.kwargs)


def _without_reasoning(view: _TurnView, prompt: str) -> _Found:
    full = view.answered()
    if full.startswith(prompt):
        return _Found(full[len(prompt) :])
    opened = _opened_think(prompt)
    rest = _after_think(full, prompt, *opened) if opened is not None else None
    if opened is None or rest is None:
        raise _unstable(prompt, full)
    # the prompt opens a think block that this answer has nothing for: it is closed empty, as context only
    return _Found(opened[1] + rest, think=len(opened[1]))


def _opened_think(prompt: str) -> tuple[str, str] | None:
    return next((form for form in THINK_FORMS if prompt.endswith(form[0])), None)


def _after_think(rendered: str, prompt: str, opener: str, closer: str) -> str | None:
    """The answer in a render without reasoning, for a prompt that ends with an opened think block."""
    if rendered.startswith(prompt + closer):
        return rendered[len(prompt) + len(closer) :]
    bare = prompt[: len(prompt) - len(opener)]
    if not rendered.startswith(bare):
        return None
    return rendered[len(bare) :].removeprefix(closer)


def _other(content: str, answer: str) -> str:
    """`content` with another first character of its answer."""
    head = content[: len(content) - len(answer)]
    return head + ("#" if not answer.lstrip().startswith("#") else "@") + answer.lstrip()[1:]


def _common_text(left: str, right: str) -> str:
    size = min(len(left), len(right))
    at = next((i for i in range(size) if left[i] != right[i]), size)
    return left[:at]


def _unstable(prompt: str, rendered: str) -> UnstableTemplate:
    at = len(_common_text(prompt, rendered))
    return UnstableTemplate(
        f"the render with the answer does not extend the prompt that serving sends; they part at character {at}: "
        f"prompt {prompt[max(0, at - 20) : at + 60]!r}, with answer {rendered[max(0, at - 20) : at + 60]!r}",
        next="this template cannot give exact samples of such turns; have the target answer (eagle3-data synth)",
    )


def group_turns(turns: tuple[TurnText, ...]) -> tuple[SampleText, ...]:
    """Share one sample between turns while the longer text extends the shorter; each turn is learnt exactly once."""
    groups: list[list[TurnText]] = []
    for turn in reversed(turns):
        if groups and groups[-1][0].text.startswith(turn.text):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    single = len(groups) == 1
    return tuple(
        SampleText(None if single else group[0].turn, group[0].text, tuple(turn.cut for turn in reversed(group)))
        for group in reversed(groups)
    )
