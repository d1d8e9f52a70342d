"""One assistant turn as serving sees it: the prompt that is sent, and the text that comes back.

Everything is found by rendering the turn twice and comparing: with and without its reasoning, its calls, with another
answer. The one thing taken from outside is how models close a think block that the generation prompt has opened
(THINK_FORMS), since templates that drop reasoning do not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3_data.builders.samples.messages import Message
from eagle3_data.builders.samples.template import THINK_FORMS, ChatTemplate
from eagle3_data.errors import SampleError

SHOWN_CHARS = 60

GONE = object()
NOTHING_CHANGED: Mapping[str, Any] = {}


class UnstableTemplate(SampleError):
    """The render with the answer does not begin with the prompt that serving sends."""

    reason = "unstable template"


class TurnLost(SampleError):
    """The template drops a part of the very turn that should teach it: reasoning, calls or text."""

    reason = "turn not rendered"


@dataclass(frozen=True, slots=True)
class Produced:
    """What the model produces after the prompt."""

    text: str
    answer: int = 0
    """Characters of reasoning (with its closing marker) before the answer proper."""
    given: int = 0
    """Characters of an empty think block that the row did not have: context, never learnt."""


@dataclass(frozen=True, slots=True)
class TurnView:
    """Renders of one assistant turn behind its history."""

    template: ChatTemplate
    tools: tuple[Mapping[str, Any], ...]
    kwargs: Mapping[str, Any]
    history: list[dict[str, Any]]
    dicts: dict[str, Any]
    message: Message

    def prompt(self) -> str:
        return self.template.render(self.history, generation=True, tools=self.tools, kwargs=self.kwargs)

    def answered(self, changed: Mapping[str, Any] = NOTHING_CHANGED) -> str:
        """The render with this turn last; `changed` replaces fields of it, and GONE takes one away."""
        message = {name: value for name, value in {**self.dicts, **changed}.items() if value is not GONE}
        return self.template.render([*self.history, message], generation=False, tools=self.tools, kwargs=self.kwargs)

    def produced(self, prompt: str, *, locate_answer: bool) -> Produced:
        """Raises UnstableTemplate or TurnLost when the turn cannot be had from this template."""
        full = self.answered()
        self._check_calls(full)
        if self.message.reasoning:
            return self._with_reasoning(prompt, full, locate_answer)
        if full.startswith(prompt):
            text = full[len(prompt) :]
            empty = (opener + closer for opener, closer in THINK_FORMS)
            # thinking is on and the row has no reasoning: the template's empty block is context, the row did not say it
            given = 0 if self.message.raw else next((len(block) for block in empty if text.startswith(block)), 0)
            return Produced(text, given=given)
        opened = opened_think(prompt)
        rest = after_think(full, prompt, *opened) if opened is not None else None
        if opened is None or rest is None:
            raise unstable(prompt, full)
        return Produced(opened[1] + rest, given=len(opened[1]))

    def _with_reasoning(self, prompt: str, full: str, locate_answer: bool) -> Produced:
        field = self.template.reasoning_field
        content = self.dicts["content"]
        bare = self.answered({field: GONE, "content": self.message.text if isinstance(content, str) else content})
        if full != bare:
            if not full.startswith(prompt):
                raise unstable(prompt, full)
            answer = self._answer_start(full, str(content or "")) - len(prompt) if locate_answer else 0
            return Produced(full[len(prompt) :], answer=max(answer, 0))
        opened = opened_think(prompt)
        rest = after_think(bare, prompt, *opened) if opened is not None else None
        if opened is not None and rest is not None:
            thought = self.message.reasoning.strip("\n") + opened[1]
            return Produced(thought + rest, answer=len(thought))
        inline = self.answered({field: GONE, "content": self.message.inline})
        if inline == bare or not inline.startswith(prompt):
            raise TurnLost(
                "the template drops the reasoning of the turn it should teach",
                next="set reasoning to 'drop', or have the target answer (eagle3-data synth)",
            )
        answer = self._answer_start(inline, self.message.inline) - len(prompt) if locate_answer else 0
        return Produced(inline[len(prompt) :], answer=max(answer, 0))

    def _answer_start(self, full: str, content: str) -> int:
        """Where the answer begins in a render with reasoning: where another answer's render departs from it."""
        answer = self.message.text
        head = content[: len(content) - len(answer)] if content.endswith(answer) else ""
        other = head + ("@" if answer.lstrip().startswith("#") else "#") + answer.lstrip()[1:]
        field: Any = self.dicts.get(self.template.reasoning_field, GONE) if content == answer else GONE
        return common(full, self.answered({self.template.reasoning_field: field, "content": other}))

    def _check_calls(self, full: str) -> None:
        """Some templates take the first call only, no call at all, or drop the text beside calls: never in silence."""
        calls = self.dicts.get("tool_calls")
        if not calls:
            return
        fewer: dict[str, Any] = (
            {"tool_calls": calls[:-1]} if calls[:-1] else {"tool_calls": GONE, "content": self.message.text}
        )
        if full == self.answered(fewer):
            raise TurnLost(f"the template does not render tool call {len(calls)} of {len(calls)} in this turn")
        if self.message.text and full == self.answered({"content": ""}):
            raise TurnLost("the template does not render the text that stands beside the tool calls of this turn")


def opened_think(prompt: str) -> tuple[str, str] | None:
    """The form of the think block that this generation prompt leaves open, if it does."""
    return next((form for form in THINK_FORMS if prompt.endswith(form[0])), None)


def after_think(rendered: str, prompt: str, opener: str, closer: str) -> str | None:
    """The answer in a render without reasoning, for a prompt that ends with an opened think block."""
    if rendered.startswith(prompt + closer):
        return rendered[len(prompt) + len(closer) :]
    bare = prompt[: len(prompt) - len(opener)]
    return rendered[len(bare) :].removeprefix(closer) if rendered.startswith(bare) else None


def common(left: str, right: str) -> int:
    """Length of the common prefix, in characters."""
    size = min(len(left), len(right))
    return next((i for i in range(size) if left[i] != right[i]), size)


def unstable(prompt: str, rendered: str) -> UnstableTemplate:
    at = common(prompt, rendered)
    start = max(0, at - SHOWN_CHARS // 3)
    return UnstableTemplate(
        f"the render with the answer does not extend the prompt that serving sends; they part at character {at}: "
        f"prompt ...{prompt[start : at + SHOWN_CHARS]!r}, with the answer ...{rendered[start : at + SHOWN_CHARS]!r}",
        next="this template cannot give exact samples of such turns; have the target answer (eagle3-data synth)",
    )
