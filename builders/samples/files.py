"""Files, folders and `datasets` paths to raw rows with the place each came from; nothing is held whole."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from eagle3_data.errors import ConfigError, InputError

Inputs = str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for one row that cannot be read, among others that can."""

    why: str


Placed = Iterator[tuple[str, str | Mapping[str, Any] | Unreadable]]
"""(place, row): the row as a JSON line or as an object."""

READ_CHARS = 1 << 20

MAX_ELEMENT_CHARS = 64 << 20
"""Longest element of a JSON array; beyond it the text is taken to be broken."""


def open_parts(inputs: Inputs) -> tuple[tuple[str, ...], list[Placed]]:
    """Names of the inputs, and one stream for each. Raises InputError for a path that is not there."""
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


def _path_rows(name: str) -> Placed:
    path = Path(name)
    if path.is_file():
        return _file_rows(path)
    if _is_saved(path):
        return _saved_rows(path)
    if path.is_dir():
        files = read_files(path)
        if not files:
            raise InputError(f"{path}: no .jsonl, .json or .parquet file in this folder")
        return (row for file in files for row in _file_rows(file))
    if _reader(path) is not None or name.startswith(("/", ".")):
        raise InputError(f"{path}: no such file or folder")
    return _hub_rows(name)


def read_files(folder: Path) -> list[Path]:
    """The files in a folder whose rows are read, in that order; of a saved data set all but what `map` has cached."""
    if _is_saved(folder):
        return sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("cache-"))
    return sorted(file for file in folder.iterdir() if _reader(file) is not None and file.is_file())


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()


def _file_rows(path: Path) -> Placed:
    reader = _reader(path)
    if reader is None:
        raise InputError(f"{path}: unknown kind of file; expected .jsonl, .json (also .gz) or .parquet")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty")
    return reader(path)


def _reader(path: Path) -> Callable[[Path], Placed] | None:
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    readers: dict[str, Callable[[Path], Placed]] = {
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


def _json_any(path: Path) -> Placed:
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


def _parquet_rows(path: Path) -> Placed:
    import pyarrow.parquet as pq
    from pyarrow import ArrowInvalid

    try:
        file, number = pq.ParquetFile(path), 0
    except ArrowInvalid as error:
        raise InputError(f"{path}: not a Parquet file ({error})") from error
    with file:
        for batch in file.iter_batches(batch_size=256):
            for value in _batch_rows(batch):
                yield f"{path}: row {number}", value
                number += 1


def _batch_rows(batch: Any) -> Iterator[Mapping[str, Any] | Unreadable]:
    """Rows of an Arrow batch. Its texts are bytes that nobody has checked yet."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for at in range(batch.num_rows):
            try:
                yield batch.slice(at, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield Unreadable(f"not UTF-8 text ({error.reason})")


def _saved_rows(path: Path) -> Placed:
    import datasets

    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.DatasetDict):
        raise InputError(f"{path}: several splits ({', '.join(saved)})", next=f"name one: {path}/{next(iter(saved))}")
    return ((f"{path}: row {number}", row) for number, row in enumerate(_dataset_rows(saved)))


def _dataset_rows(saved: Any) -> Iterator[Mapping[str, Any] | Unreadable]:
    """Rows of a `datasets.Dataset`; a row that is no text is stepped over."""
    at = 0
    while at < len(saved):
        try:
            for row in saved.select(range(at, len(saved))) if at else saved:
                yield row
                at += 1
        except UnicodeDecodeError as error:
            yield Unreadable(f"not UTF-8 text ({error.reason})")
            at += 1


def _hub_rows(name: str) -> Placed:
    import datasets

    path, _, split = name.partition(":")
    try:
        stream = datasets.load_dataset(path, split=split or "train", streaming=True)
    except (FileNotFoundError, ValueError, ConnectionError) as error:
        raise ConfigError(
            f"{name}: neither a file nor a data set that can be loaded ({type(error).__name__}: {error})",
            next="give a .jsonl, .json or .parquet file, or `name:split` of a data set",
        ) from error
    return _streamed_rows(name, stream)


def _streamed_rows(name: str, stream: Iterable[Mapping[str, Any]]) -> Placed:
    """A stream cannot be taken up again behind a row that is no text."""
    number = 0
    try:
        for row in stream:
            yield f"{name}: row {number}", row
            number += 1
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: row {number} is not UTF-8 text ({error.reason})", next="save the data set without that row"
        ) from error
