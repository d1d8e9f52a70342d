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

from eagle3_data import durable
from eagle3_data.protocol import parse_strict

Event = Literal["start", "tick", "end"]
TAIL_BYTES = 1 << 18
ROOM_BYTES = 1 << 13


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
    failed_tokens: int = 0
    """Of the samples given up: nobody waits for them any more."""
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
    """Appends ticks; each is on its way to the disk before `write` returns.

    Empty lines are written ahead of them, which readers skip: room for what a run has to say when the disk is full.
    When that room ends, the newest tick takes the place of the one before.
    """

    def __init__(self, folder: Path) -> None:
        self.path = journal_path(folder)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self._size = os.fstat(self._fd).st_size
        self._last = self._end = self._find_end()

    def write(self, tick: Tick) -> None:
        """Never raises for a full disk."""
        line = tick.to_line().encode()
        self._make_room()
        if self._end + 2 * len(line) > self._size:
            at, data = self._last, line.ljust(self._end - self._last, b"\n")
        else:
            at, data = self._end, line
        try:
            os.pwrite(self._fd, data, at)
        except OSError as error:
            if not durable.is_full(error):
                raise
            return  # a file system that copies on write has no room even for this
        self._last, self._end = at, at + len(line)
        self._size = max(self._size, self._end)

    def close(self) -> None:
        os.ftruncate(self._fd, self._end)
        os.close(self._fd)

    def _make_room(self) -> None:
        if self._size >= self._end + ROOM_BYTES // 2:
            return
        try:
            os.pwrite(self._fd, b"\n" * (self._end + ROOM_BYTES - self._size), self._size)
        except OSError as error:
            if not durable.is_full(error):
                raise
        self._size = os.fstat(self._fd).st_size

    def _find_end(self) -> int:
        """Behind the last line. A killed run may have torn it, and has left its room behind it."""
        end = self._size
        while end:
            start = max(0, end - ROOM_BYTES)
            text = os.pread(self._fd, end - start, start).rstrip(b"\n")
            if text:
                end = start + len(text)
                break
            end = start
        if end == 0:
            return 0
        if end == self._size:
            os.pwrite(self._fd, b"\n", end)
            self._size += 1
        return end + 1


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
