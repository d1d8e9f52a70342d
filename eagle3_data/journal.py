"""The journal of a run: one JSON line per interval, flushed as it happens. `status` reads nothing else.

{"event": "tick", "t": 1795989003.6, "done": 9120, "of": 37312, "tokens": 21400000, "tokens_of": 87800000, ...}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from eagle3_data.protocol import parse_strict

Event = Literal["start", "tick", "end"]
TAIL_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """State of a run at one moment. Counts are of the whole build, all its runs together."""

    event: Event
    t: float
    """Seconds since the epoch."""
    phase: str
    """'samples', 'extract', 'seal' while running; 'finished', 'interrupted', 'failed' at the end."""
    done: int
    """Samples saved (placed in a shard and checked)."""
    of: int
    """Samples to extract: the real total, known before the first request."""
    tokens: int
    tokens_of: int
    nbytes: int
    """Shard bytes written."""
    nbytes_of: int
    failed: dict[str, int] = field(default_factory=dict)
    """Given up, by reason."""
    retried: dict[str, int] = field(default_factory=dict)
    """Attempts that failed and were repeated, by reason."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Conversations that never became samples, by reason."""
    run_tokens: int = 0
    """Tokens saved since this build was first started, without what a resume found."""
    active_s: float = 0.0
    """Seconds spent extracting, all runs together."""
    inflight: int = 0
    request_s: float = 0.0
    """Median seconds from request to sealed place, over the last 100 samples."""
    slowest_s: float = 0.0
    free_bytes: int = 0
    """Free space where the shards go."""
    servers_up: int = 0
    servers: int = 0
    note: str = ""
    """What is being waited for, or why the run ended."""

    @property
    def settled(self) -> int:
        return self.done + sum(self.failed.values())

    def to_line(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Tick:
        """Raises ValueError on a torn or foreign line."""
        loaded: dict[str, Any] = json.loads(line)
        try:
            return cls(**parse_strict(cls, loaded, "journal line"))
        except TypeError as error:
            raise ValueError(str(error)) from error


def journal_path(folder: Path) -> Path:
    return folder / ".build" / "journal.jsonl"


class Journal:
    """Appends ticks; each is on its way to the disk before `write` returns."""

    def __init__(self, folder: Path) -> None:
        self.path = journal_path(folder)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # a killed run may have torn its last line

    def write(self, tick: Tick) -> None:
        os.write(self._fd, tick.to_line().encode())

    def close(self) -> None:
        os.close(self._fd)


def read_tail(path: Path, nbytes: int = TAIL_BYTES) -> list[Tick]:
    """The last ticks, oldest first; the cost does not depend on the journal's length."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - nbytes))
            text = file.read()
    except FileNotFoundError:
        return []
    lines = text.decode(errors="replace").split("\n")
    if size > nbytes:
        lines = lines[1:]
    return list(_ticks(lines))


def _ticks(lines: list[str]) -> Iterator[Tick]:
    for line in lines:
        try:
            yield Tick.from_line(line)
        except ValueError:
            continue  # torn by a kill, or the empty end
