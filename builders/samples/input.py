"""Files and `datasets` paths to a stream of rows, one at a time: flat memory over millions of rows.

The form (OpenAI messages, ShareGPT, prompts, ready ids) is read from the first rows and stated; a later row of another
form is an error that names its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_data.builders.samples.files import Inputs, Placed, Unreadable, open_parts
from eagle3_data.builders.samples.messages import (
    Conversation,
    Message,
    Row,
    ServedRow,
    parse_message,
    parse_sharegpt_message,
    parse_tools,
)
from eagle3_data.builders.samples.texts import check_texts
from eagle3_data.errors import InputError, SampleError
from eagle3_data.shards.layout import MAX_ID_BYTES, id_nbytes

PEEK_ROWS = 64
"""Rows read before the form is settled."""


class BadRow(SampleError):
    """A row of the right form with content that cannot become a sample (images, unknown roles, broken tool calls)."""

    reason = "invalid row"


class IdTooLong(BadRow):
    """A shard's record has no room for this id."""

    reason = "id too long"


def check_id(where: str, sample_id: str) -> None:
    """Raises IdTooLong, before anything is captured for it."""
    if (nbytes := id_nbytes(sample_id)) > MAX_ID_BYTES:
        raise IdTooLong(
            f"{where}: its id takes {nbytes} bytes as JSON (6 for a character that is not ASCII), {MAX_ID_BYTES} fit",
            next="shorten the id, or leave it out: rows are numbered",
        )


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row before parsing: a JSON line or an object, and the place an error should name."""

    row: int
    where: str
    data: str | Mapping[str, Any] | Unreadable

    def value(self) -> Mapping[str, Any]:
        """The object. Raises InputError naming the place and what was found there, BadRow for text that is none."""
        if isinstance(self.data, Unreadable):
            raise BadRow(f"{self.where}: {self.data.why}")
        if not isinstance(self.data, str):
            return self.data
        try:
            value = json.loads(self.data)
        except ValueError as error:
            raise InputError(
                f"{self.where}: not JSON ({error}); found {self.data.strip()[:80]!r}",
                next="every line must hold one JSON object",
            ) from error
        if not isinstance(value, Mapping):
            raise InputError(f"{self.where}: found {type(value).__name__}, expected a JSON object")
        return value


@dataclass(frozen=True, slots=True)
class Form:
    """One way of writing conversations: its name, the column that gives it away, its parser."""

    name: str
    column: str
    parse: Callable[[RawRow, Mapping[str, Any]], Row]


def row_id(raw: RawRow, value: Mapping[str, Any]) -> str:
    for name in ("id", "conversation_id", "uuid", "prompt_id"):
        if isinstance(value.get(name), str | int):
            return str(value[name])
    return str(raw.row)


def row_source(value: Mapping[str, Any]) -> str | None:
    for name in ("source", "dataset", "category"):
        if isinstance(value.get(name), str):
            return str(value[name])
    return None


def parse_served(raw: RawRow, value: Mapping[str, Any]) -> ServedRow:
    ids, mask = value["input_ids"], value.get("loss_mask")
    if not isinstance(ids, Sequence) or not isinstance(mask, Sequence) or len(ids) != len(mask):
        raise InputError("input_ids and loss_mask must be lists of one length")
    if any(not isinstance(i, int) or not 0 <= i < 1 << 31 for i in ids) or any(m not in (0, 1) for m in mask):
        raise InputError("input_ids must be token ids and loss_mask 0 or 1")
    return ServedRow(raw.row, row_id(raw, value), tuple(ids), tuple(int(m) for m in mask), row_source(value))


def conversation(raw: RawRow, value: Mapping[str, Any], messages: Iterable[Message]) -> Conversation:
    tools = parse_tools(value.get("tools"))
    return Conversation(raw.row, row_id(raw, value), tuple(messages), tools, row_source(value))


def parse_openai(raw: RawRow, value: Mapping[str, Any]) -> Conversation:
    messages = value.get("messages", value.get("conversations"))
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError("messages must be a list of at least one message")
    return conversation(raw, value, (parse_message(message) for message in messages))


def parse_sharegpt(raw: RawRow, value: Mapping[str, Any]) -> Conversation:
    turns = value["conversations"]
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise InputError("conversations must be a list of at least one turn")
    system = value.get("system")
    head = [Message(role="system", content=system)] if isinstance(system, str) and system else []
    return conversation(raw, value, (*head, *(parse_sharegpt_message(turn) for turn in turns)))


def parse_prompt(raw: RawRow, value: Mapping[str, Any]) -> Conversation:
    prompt = value.get("prompt")
    if isinstance(prompt, str) and prompt:
        return conversation(raw, value, [Message(role="user", content=prompt)])
    if isinstance(prompt, Sequence) and prompt and not isinstance(prompt, str):
        return conversation(raw, value, (parse_message(message) for message in prompt))
    raise InputError("prompt must be a text or a list of messages")


FORMS = (
    Form("token ids", "input_ids", parse_served),
    Form("OpenAI messages", "messages", parse_openai),
    Form("OpenAI messages (in `conversations`)", "conversations", parse_openai),
    Form("ShareGPT", "conversations", parse_sharegpt),
    Form("prompts", "prompt", parse_prompt),
)


def form_of(value: Mapping[str, Any]) -> Form | None:
    """The form of one row, by its columns (and, for `conversations`, by the keys of its first turn)."""
    for form in FORMS:
        if value.get(form.column) is None:
            continue
        if form.column == "conversations":
            turns = value["conversations"]
            first = turns[0] if isinstance(turns, Sequence) and turns else {}
            return FORMS[2] if isinstance(first, Mapping) and "role" in first else FORMS[3]
        return form
    return None


def parse_row(raw: RawRow, form: Form) -> Row:
    """Typed row of the settled form.

    Raises InputError naming the place for what is no row of this form, BadRow for one whose content is unfit.
    """
    value = raw.value()
    found = form_of(value)
    if found is None or found.name != form.name:
        what = "no column of a known form" if found is None else f"the form {found.name!r}"
        raise InputError(
            f"{raw.where}: {what} (columns {', '.join(sorted(map(str, value)))}), the first rows are {form.name!r}",
            next="put rows of one form into one file",
        )
    try:
        row = form.parse(raw, value)
        check_texts(row)
    except InputError as error:
        raise BadRow(f"{raw.where}: {error.message}", next=error.next) from error
    check_id(raw.where, row.id)
    return row


def detect_form(rows: Sequence[RawRow]) -> Form:
    """The form of the first rows. Raises InputError when they show none, or two."""
    rows = [row for row in rows if not isinstance(row.data, Unreadable)]
    if not rows:
        raise InputError("no rows: the input is empty, or its first rows are no text")
    first = form_of(rows[0].value())
    if first is None:
        columns = ", ".join(sorted(map(str, rows[0].value())))
        raise InputError(
            f"{rows[0].where}: no column of a known form; found {columns or 'none'}",
            next="expected one of: " + ", ".join(f"`{form.column}` ({form.name})" for form in FORMS),
        )
    return first


@dataclass(frozen=True, slots=True)
class RowStream:
    """Rows of all inputs in order, and their settled form. Iterate once."""

    form: Form
    rows: Iterator[RawRow]
    names: tuple[str, ...]

    def __iter__(self) -> Iterator[RawRow]:
        return self.rows


def open_rows(inputs: Inputs) -> RowStream:
    """Open files, folders and `datasets` paths (`name` or `name:split`), or rows already in memory.

    Raises InputError for a missing or empty input, a malformed line, or rows of an unknown form.
    """
    names, parts = open_parts(inputs)
    rows = _numbered(parts)
    head = [raw for _, raw in zip(range(PEEK_ROWS), rows, strict=False)]
    if not head:
        raise InputError(f"no rows in {', '.join(names)}", next="an empty file cannot become samples")
    form = detect_form(head)

    def chained() -> Iterator[RawRow]:
        yield from head
        yield from rows

    return RowStream(form, chained(), names)


def _numbered(parts: Iterable[Placed]) -> Iterator[RawRow]:
    row = 0
    for part in parts:
        for where, data in part:
            yield RawRow(row, where, data)
            row += 1
