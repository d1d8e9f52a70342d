"""Which characters of a rendered conversation the assistant produced: by prefix rendering, never by searching the text.

For an assistant turn, serving sends P = the render of the messages before it with the generation prompt, and the render
F of the messages up to it extends P by what the model produced. Turns whose F also begins a later turn's F share that
one sample (append-only templates); where the template rewrites history they become samples of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3_data.builders.samples.encode import Cut
from eagle3_data.builders.samples.messages import Conversation, Message
from eagle3_data.builders.samples.policy import NOTHING
from eagle3_data.builders.samples.spec import SampleSpec
from eagle3_data.builders.samples.template import ChatTemplate
from eagle3_data.builders.samples.tools import served_tools
from eagle3_data.builders.samples.turn import TurnView
from eagle3_data.errors import SampleError


class NothingToLearn(SampleError):
    """No assistant turn, or only empty ones."""

    reason = NOTHING


@dataclass(frozen=True, slots=True)
class TurnText:
    """One assistant turn: `text[:cut.prompt]` is sent by serving, `text[cut.prompt:]` comes back."""

    turn: int
    """Ordinal among the assistant turns, from 0."""
    text: str
    cut: Cut
    thinking: bool | None
    """Mode told to the template; None when it has no switch or none was asked for."""
    think_added: bool
    """An empty think block, which the row did not have, stands before the answer and is not learnt."""


@dataclass(frozen=True, slots=True)
class SampleText:
    """Text of one sample-to-be with its turns, in order."""

    text: str
    turns: tuple[TurnText, ...]
    alone: bool
    """The conversation's only sample."""

    @property
    def cuts(self) -> tuple[Cut, ...]:
        return tuple(turn.cut for turn in self.turns)

    def split(self) -> list[SampleText]:
        """One sample per turn."""
        return [SampleText(turn.text, (turn,), alone=False) for turn in self.turns]

    def key(self, row: int) -> str:
        """`00000012`, or `00000012_t1` by its last turn when the conversation became several samples."""
        return f"{row:08d}" if self.alone else f"{row:08d}_t{self.turns[-1].turn}"


@dataclass(frozen=True, slots=True)
class ConversationTexts:
    samples: tuple[SampleText, ...]
    empty_turns: int
    """Assistant turns that say nothing: context, never learnt."""


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
        empty = len(positions) - len(spoken)
        if self.spec.loss == "last-turn":
            spoken = spoken[-1:]
        dicts, tools = self.template.messages(conversation), self._tools(conversation)
        turns = [self._turn(conversation.messages[at], tools, dicts, turn, at) for turn, at in spoken]
        return ConversationTexts(group_turns(turns), empty)

    def prompt(self, conversation: Conversation, at: int, thinking: bool | None) -> str:
        """What serving sends to have message `at` answered."""
        dicts, kwargs = self.template.messages(conversation)[:at], self.thinking_kwargs(thinking)
        return self.template.render(dicts, generation=True, tools=self._tools(conversation), kwargs=kwargs)

    def _tools(self, conversation: Conversation) -> tuple[Mapping[str, Any], ...]:
        return served_tools(conversation.tools, self.spec.tool_schemas)

    def thinking_kwargs(self, thinking: bool | None) -> Mapping[str, Any]:
        """The template's own switches, set to `thinking`."""
        return {} if thinking is None else dict.fromkeys(self.template.thinking_switches, thinking)

    def thinking_of(self, turn: Message) -> bool | None:
        """The mode in which a turn was, or is to be, produced."""
        if self.spec.thinking == "template" or not self.template.thinking_switches:
            return None
        return bool(turn.reasoning) if self.spec.thinking == "auto" else self.spec.thinking == "on"

    def _turn(
        self, message: Message, tools: tuple[Mapping[str, Any], ...], dicts: list[dict[str, Any]], turn: int, at: int
    ) -> TurnText:
        thinking = self.thinking_of(message)
        view = TurnView(self.template, tools, self.thinking_kwargs(thinking), dicts[:at], dicts[at], message)
        prompt, aside = view.prompt(), self.spec.reasoning == "context"
        produced = view.produced(prompt, locate_answer=aside)
        start = len(prompt) + produced.given + (produced.answer if aside else 0)
        text = prompt + produced.text
        return TurnText(turn, text, Cut(len(prompt), start, len(text)), thinking, produced.given > 0)


def group_turns(turns: list[TurnText]) -> tuple[SampleText, ...]:
    """Share one sample between turns while the longer text extends the shorter; each turn is learnt exactly once."""
    groups: list[list[TurnText]] = []
    for turn in reversed(turns):
        if groups and groups[-1][0].text.startswith(turn.text):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    alone = len(groups) == 1
    return tuple(SampleText(group[0].text, tuple(reversed(group)), alone) for group in reversed(groups))
