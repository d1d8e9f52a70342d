"""One row to answers: the prompt's ids go to the server, its ids come back and are kept exactly as served.

A conversation is answered anew turn by turn, each on the history of the new answers. Turns share one answer row while
the next prompt's ids extend what was served (append-only templates); otherwise each turn is a row of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from eagle3_data.builders.samples.encode import Encoder
from eagle3_data.builders.samples.mask import Masker
from eagle3_data.builders.samples.messages import ASSISTANT, Conversation, Message, split_think
from eagle3_data.builders.samples.template import THINK_FORMS
from eagle3_data.errors import DumpMismatch, SampleError
from eagle3_data.server.client import Reply

Ask = Callable[[Sequence[int]], Awaitable[Reply]]
"""Prompt ids to the server's reply."""

FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"


class AnswerTruncated(SampleError):
    """The answer reached the limit, and such answers are not wanted."""

    reason = "truncated"


@dataclass(frozen=True, slots=True)
class Answer:
    """Ids as served: prompt, then what the server generated; the mask is 1 on generated tokens."""

    turn: int
    """Ordinal of the last assistant turn in it."""
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    messages: tuple[Message, ...]
    finish_reason: str
    prompt_tokens: int
    """Tokens before the first generated one."""

    @property
    def output_tokens(self) -> int:
        return sum(self.loss_mask)


class Dialogue:
    """Asks for the answers of one conversation after another."""

    def __init__(self, masker: Masker, encoder: Encoder, *, keep_truncated: bool) -> None:
        self.masker, self.encoder, self.keep_truncated = masker, encoder, keep_truncated

    async def answer(self, conversation: Conversation, ask: Ask) -> list[Answer]:
        """Raises what `ask` raises, SampleError for a conversation that cannot be asked, and AnswerTruncated."""
        messages = list(conversation.messages)
        while messages and messages[-1].role == ASSISTANT and messages[-1].is_empty:
            messages.pop()
        # calls stay as they are, since the replies that follow belong to them
        targets = [at for at, turn in enumerate(messages) if turn.role == ASSISTANT and not turn.tool_calls]
        if not targets or messages[-1].role != ASSISTANT:
            messages.append(Message(role=ASSISTANT))
            targets.append(len(messages) - 1)
        answers: list[Answer] = []
        for turn, at in enumerate(targets):
            asked = replace(conversation, messages=tuple(messages[: at + 1]))
            answer = await self._turn(asked, turn, at, ask, answers[-1] if answers else None)
            messages[at] = answer.messages[-1]
            if answers and answer.input_ids[: len(answers[-1].input_ids)] == answers[-1].input_ids:
                answers.pop()
            answers.append(answer)
            if answer.finish_reason == "length":
                break  # nothing can follow an answer without an end
        return answers

    async def _turn(self, asked: Conversation, turn: int, at: int, ask: Ask, before: Answer | None) -> Answer:
        text = self.masker.prompt(asked, at, self.masker.thinking_of(asked.messages[at]))
        prompt = self.encoder.encode(text)
        reply = await ask(prompt)
        if reply.prompt_tokens != len(prompt):
            raise DumpMismatch(f"sent {len(prompt)} prompt tokens, the server counted {reply.prompt_tokens}")
        if reply.finish_reason == "length" and not self.keep_truncated:
            raise AnswerTruncated(f"no end within {len(reply.output_ids)} tokens")
        if not reply.output_ids:
            raise DumpMismatch("the server generated no token")
        message = self.parse(text, reply.output_ids)
        extends = before is not None and tuple(prompt[: len(before.input_ids)]) == before.input_ids
        mask = list(before.loss_mask) if before is not None and extends else []
        mask += [0] * (len(prompt) - len(mask)) + [1] * len(reply.output_ids)
        return Answer(
            turn=turn,
            input_ids=(*prompt, *reply.output_ids),
            loss_mask=tuple(mask),
            messages=(*asked.messages[:at], message),
            finish_reason=reply.finish_reason,
            prompt_tokens=mask.index(1),
        )

    def parse(self, prompt: str, output_ids: Sequence[int]) -> Message:
        """The answer as a message, for readers and for the history of later turns; ids are never made from it."""
        ids = list(output_ids)
        if ids[-1] in self.encoder.special_ids:
            ids.pop()
        text = self.encoder.decode(ids)
        if text.startswith("<|channel|>"):
            thought, _, answer = text.partition(FINAL)
            return Message(role=ASSISTANT, content=answer, reasoning=thought.removeprefix(ANALYSIS).partition("<|")[0])
        if prompt.endswith(tuple(opener for opener, _ in THINK_FORMS)):
            text = "<think>" + text
        reasoning, answer = split_think(text)
        return Message(role=ASSISTANT, content=answer, reasoning=reasoning)
