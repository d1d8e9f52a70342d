"""Texts of a row that no tokenizer and no file can take: half a surrogate pair, as text cut in UTF-16 leaves it.

JSON may write one as an escape, so it is looked for in what was parsed: arguments of calls and tools can be JSON, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3_data.builders.samples.messages import Conversation, Row
from eagle3_data.errors import InputError

SHOWN_CHARS = 20


def check_texts(row: Row) -> None:
    """Raises InputError naming the first text of the row that does not encode as UTF-8."""
    for where, text in _texts(row):
        if text.isascii():
            continue
        try:
            text.encode()
        except UnicodeEncodeError as error:
            near = text[max(0, error.start - SHOWN_CHARS) : error.start + SHOWN_CHARS]
            raise InputError(
                f"half a surrogate pair at character {error.start} of {where}: ...{near!a}; it is no text",
                next="text that was cut inside an emoji: cut it by characters, not by UTF-16 units",
            ) from None


def _texts(row: Row) -> Iterator[tuple[str, str]]:
    yield "the id", row.id
    yield "the source", row.source or ""
    if not isinstance(row, Conversation):
        return
    for number, message in enumerate(row.messages):
        where = f"message {number}"
        fields = (message.content, message.reasoning, message.raw, message.name, message.tool_call_id)
        for text in _strings(fields):
            yield where, text
        for call in message.tool_calls:
            for text in _strings((call.name, call.id, call.arguments)):
                yield f"a tool call of {where}", text
    for text in _strings(row.tools):
        yield "the tools", text


def _strings(value: Any) -> Iterator[str]:
    """All texts in plain JSON values, names included; without recursion, since strangers nest as deep as they like."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            waiting.extend(one.keys())
            waiting.extend(one.values())
        elif isinstance(one, list | tuple):
            waiting.extend(one)
