"""Files and `datasets` paths to a stream of rows, one at a time: flat memory over millions of rows.

The form (OpenAI messages, ShareGPT, prompts, ready ids) is read from the first rows and stated; a later row of another
form is an error that names its place.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from eagle3_data.builders.samples.messages import (
    Conversation,
    Message,
    Row,
    ServedRow,
    parse_message,
    parse_sharegpt_message,
    parse_tools,
)
from eagle3_data.errors import ConfigError, InputError, SampleError

Inputs = str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]]

PEEK_ROWS = 64
"""Rows read before the form is settled."""

READ_CHARS = 1 << 20

MAX_ELEMENT_CHARS = 64 << 20
"""Longest element of a JSON array; beyond it the text is taken to be broken."""


class BadRow(SampleError):
    """A row of the right form with content that cannot become a sample (images, unknown roles, broken tool calls)."""

    reason = "invalid row"


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row before parsing: a JSON line or an object, and the place an error should name."""

    row: int
    where: str
    data: str | Mapping[str, Any]

    def value(self) -> Mapping[str, Any]:
        """The object. Raises InputError naming the place and what was found there."""
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
    if found is None or found is not form:
        what = "no column of a known form" if found is None else f"the form {found.name!r}"
        raise InputError(
            f"{raw.where}: {what} (columns {', '.join(sorted(map(str, value)))}), the first rows are {form.name!r}",
            next="put rows of one form into one file",
        )
    try:
        return form.parse(raw, value)
    except InputError as error:
        raise BadRow(f"{raw.where}: {error.message}", next=error.next) from error


def detect_form(rows: Sequence[RawRow]) -> Form:
    """The form of the first rows. Raises InputError when they show none, or two."""
    if not rows:
        raise InputError("no rows: the input is empty")
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
    names, parts = _parts(inputs)
    rows = _numbered(parts)
    head = [raw for _, raw in zip(range(PEEK_ROWS), rows, strict=False)]
    if not head:
        raise InputError(f"no rows in {', '.join(names)}", next="an empty file cannot become samples")
    form = detect_form(head)

    def chained() -> Iterator[RawRow]:
        yield from head
        yield from rows

    return RowStream(form, chained(), names)


def _numbered(parts: Iterable[Iterator[tuple[str, str | Mapping[str, Any]]]]) -> Iterator[RawRow]:
    row = 0
    for part in parts:
        for where, data in part:
            yield RawRow(row, where, data)
            row += 1


def _parts(inputs: Inputs) -> tuple[tuple[str, ...], list[Iterator[tuple[str, str | Mapping[str, Any]]]]]:
    if isinstance(inputs, str | Path):
        inputs = [inputs]
    if isinstance(inputs, Sequence) and inputs and all(isinstance(item, str | Path) for item in inputs):
        paths = [str(item) for item in inputs]
        return tuple(paths), [_path_rows(path) for path in paths]
    return ("rows in memory",), [_memory_rows(inputs)]


def _memory_rows(rows: Iterable[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, value in enumerate(rows):
        if not isinstance(value, Mapping):
            raise InputError(f"row {number}: {type(value).__name__}, expected a mapping")
        yield f"row {number}", value


def _path_rows(name: str) -> Iterator[tuple[str, str | Mapping[str, Any]]]:
    path = Path(name)
    if path.is_file():
        return _file_rows(path)
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return _saved_rows(path)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if _reader(file) is not None)
        if not files:
            raise InputError(f"{path}: no .jsonl, .json or .parquet file in this folder")
        return (row for file in files for row in _file_rows(file))
    if path.suffix or name.startswith(("/", ".")):
        raise InputError(f"{path}: no such file or folder")
    return _hub_rows(name)


def _file_rows(path: Path) -> Iterator[tuple[str, str | Mapping[str, Any]]]:
    reader = _reader(path)
    if reader is None:
        raise InputError(f"{path}: unknown kind of file; expected .jsonl, .json (also .gz) or .parquet")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty")
    return reader(path)


def _reader(path: Path) -> Callable[[Path], Iterator[tuple[str, str | Mapping[str, Any]]]] | None:
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    readers: dict[str, Callable[[Path], Iterator[tuple[str, str | Mapping[str, Any]]]]] = {
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".json": _json_any,
        ".parquet": _parquet_rows,
    }
    return readers.get(suffix)


def _open_text(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _json_lines(path: Path) -> Iterator[tuple[str, str]]:
    number = 0
    with _open_text(path) as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 text after line {number} ({error.reason})") from error


def _json_any(path: Path) -> Iterator[tuple[str, str | Mapping[str, Any]]]:
    with _open_text(path) as file:
        head = file.read(READ_CHARS).lstrip("\ufeff \t\r\n")
    return _json_array(path) if head.startswith("[") else _json_lines(path)


def _json_array(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Elements of a top-level array, decoded one by one: the file is never held whole."""
    decoder, number = json.JSONDecoder(), 0
    with _open_text(path) as file:
        text = file.read(READ_CHARS)
        at = text.index("[") + 1
        while True:
            at = _skip(text, at, " \t\r\n,")
            if text.startswith("]", at):
                return
            try:
                value, end = decoder.raw_decode(text, at)
            except ValueError as error:
                more = file.read(READ_CHARS) if len(text) - at < MAX_ELEMENT_CHARS else ""
                if not more:
                    raise InputError(
                        f"{path}: element {number} of the array is not JSON ({error.args[0].split(':')[0]}); "
                        f"found {text[at : at + 80]!r}"
                    ) from error
                text, at = text[at:] + more, 0
                continue
            if not isinstance(value, Mapping):
                raise InputError(f"{path}: element {number} is {type(value).__name__}, expected an object")
            yield f"{path}: element {number}", value
            at, number = end, number + 1


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow.parquet as pq
    from pyarrow import ArrowInvalid

    try:
        file, number = pq.ParquetFile(path), 0
    except ArrowInvalid as error:
        raise InputError(f"{path}: not a Parquet file ({error})") from error
    with file:
        for batch in file.iter_batches(batch_size=256):
            for value in batch.to_pylist():
                yield f"{path}: row {number}", value
                number += 1


def _saved_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import datasets

    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.DatasetDict):
        raise InputError(f"{path}: several splits ({', '.join(saved)})", next=f"name one: {path}/{next(iter(saved))}")
    return ((f"{path}: row {number}", row) for number, row in enumerate(saved))


def _hub_rows(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import datasets

    path, _, split = name.partition(":")
    try:
        stream = datasets.load_dataset(path, split=split or "train", streaming=True)
    except (FileNotFoundError, ValueError, ConnectionError) as error:
        raise ConfigError(
            f"{name}: neither a file nor a data set that can be loaded ({type(error).__name__}: {error})",
            next="give a .jsonl, .json or .parquet file, or `name:split` of a data set",
        ) from error
    return ((f"{name}: row {number}", row) for number, row in enumerate(stream))
