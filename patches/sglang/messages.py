"""What the scheduler process and the process that writes dumps tell each other, as JSON on a socket.

Neither torch nor SGLang is imported here: the process that writes is there in a tenth of a second and small.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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

    def encode(self) -> bytes:
        return json.dumps({**asdict(self), "spool": str(self.spool)}).encode()

    @classmethod
    def decode(cls, message: bytes) -> Setup:
        found = json.loads(message)
        form = {**found["form"], "layers": tuple(found["form"]["layers"])}
        return cls(Path(found["spool"]), SpoolConfig(**found["config"]), DumpForm(**form))


class Begin(NamedTuple):
    """A prompt, by the number that the other messages call it."""

    number: int
    rid: str
    ids: str
    """int32, in base64"""

    @classmethod
    def of(cls, number: int, rid: str, ids: array[int]) -> Begin:
        return cls(number, rid, base64.b64encode(ids).decode())

    def ids_array(self) -> array[int]:
        return array("i", base64.b64decode(self.ids))


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
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Begin, Rows, Fail, Abandon, Close)}


def encode(changes: Sequence[Change]) -> bytes:
    return json.dumps([(type(change).__name__, *change) for change in changes]).encode()


def decode(message: bytes) -> list[Change]:
    """Raises ValueError, KeyError or TypeError for what `encode` has not made."""
    changes: list[Change] = [_KINDS[kind](*values) for kind, *values in json.loads(message)]
    return [
        c._replace(spans=Spans(*((start, end) for start, end in c.spans))) if isinstance(c, Rows) else c
        for c in changes
    ]


@dataclass(slots=True)
class Report:
    """From the process that writes: what happened since the last one, and its counts since it was started."""

    released: list[int] = field(default_factory=list)
    """Blocks, once for each rows."""
    settled: list[int] = field(default_factory=list)
    """Prompts that are written, failed or dropped."""
    written: int = 0
    failed: int = 0

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> Report:
        return cls(**json.loads(message))
