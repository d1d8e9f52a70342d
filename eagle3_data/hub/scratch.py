"""A bound on what a build keeps on the local disk while its shards go to a mirror and are removed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from eagle3_data.errors import BuildFailed
from eagle3_data.status import format_bytes


class Scratch:
    """Counts shard bytes here: sealed and not yet removed, and all of a shard from the moment it is begun.

    Thread-safe. `on_full` is called while a shard waits for room.
    """

    def __init__(self, folder: Path, limit_bytes: int, on_full: Callable[[], None] = lambda: None) -> None:
        self.limit_bytes, self.on_full = limit_bytes, on_full
        self._lock = threading.Lock()
        self._dead = ""
        data = folder / "data"
        self._held = {path.name: path.stat().st_size for path in data.glob("*.tar")} if data.exists() else {}

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(self._held.values())

    def begin(self, name: str, nbytes: int) -> bool:
        """Take room for a shard; False while there is none. A shard that is alone always fits.

        Raises BuildFailed when there is none and the push that would make some has ended.
        """
        with self._lock:
            held = sum(size for other, size in self._held.items() if other != name)
            if not held or held + nbytes <= self.limit_bytes:
                self._held[name] = nbytes
                return True
            dead = self._dead
        if dead:
            raise BuildFailed(
                f"no scratch for {name}, and the push has ended: {dead}", next="mend it and repeat the command"
            )
        self.on_full()
        return False

    def abandon(self, why: str) -> None:
        """The push has ended: nothing will be removed any more."""
        with self._lock:
            self._dead = why

    def gone(self, name: str) -> None:
        """The shard was removed here, or never came to be: all its samples failed."""
        with self._lock:
            self._held.pop(name, None)

    @property
    def note(self) -> str:
        return (
            f"waiting: {format_bytes(self.held_bytes)} of {format_bytes(self.limit_bytes)} scratch wait for the mirror"
        )
