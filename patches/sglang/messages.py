"""What the scheduler process and the process that writes dumps tell each other: lists of these, pickled, on a socket.

Neither torch nor SGLang is imported here: the process that writes is there in a tenth of a second and small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from eagle3_data.patches.sglang.dumps import DumpForm
from eagle3_data.protocol import SpoolConfig

Span = tuple[int, int]
"""(start, end) in the arena, in bytes."""


class Spans(NamedTuple):
    """Some rows of one prompt in the arena."""

    aux: Span
    """[rows, L*W]"""
    last: Span
    """[rows, W]"""
    finite: Span
    """bool [rows]"""
    token: Span
    """int64: top-1 after the last of these rows"""


@dataclass(frozen=True)
class Setup:
    """The first message to the process that writes."""

    spool: Path
    config: SpoolConfig
    form: DumpForm
    arena_bytes: int


class Begin(NamedTuple):
    """A prompt, by the number that the other messages call it."""

    number: int
    rid: str
    ids: bytes
    """int32"""


class Rows(NamedTuple):
    """Rows of a prompt are there. The block is reported released, once, when they are written or of no use."""

    number: int
    start: int
    block: int
    spans: Spans


class Fail(NamedTuple):
    """Leave an error record instead of a dump; the first reason stands."""

    number: int
    reason: str
    detail: str


class Abandon(NamedTuple):
    """The same request started again: drop what there is of this dump, without a record."""

    number: int


class Close(NamedTuple):
    """Write what there is, report, end."""


Change = Begin | Rows | Fail | Abandon | Close


@dataclass(slots=True)
class Report:
    """From the process that writes: what happened since the last one, and its counts since it was started."""

    released: list[int] = field(default_factory=list)
    """Blocks, once for each rows."""
    settled: list[int] = field(default_factory=list)
    """Prompts that are written, failed or dropped."""
    written: int = 0
    failed: int = 0
