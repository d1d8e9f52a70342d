"""One builder per folder. The lock is the kernel's, so a killed builder leaves none behind."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from eagle3_data.errors import ConfigError

PATIENCE_S, POLL_S = 1.0, 0.01
"""`is_held` holds the lock for an instant: who is refused then tries again."""
WORK = ".build"
"""Folder inside a build for what is not published: samples, journal, lock, notes."""


def work_folder(folder: Path) -> Path:
    return folder / WORK


class RunLock:
    """Context manager. Raises ConfigError, naming the holder, when another process builds (or `name`s) here."""

    def __init__(self, folder: Path, name: str = "lock", who: str = "builder") -> None:
        self.path, self.who = work_folder(folder) / name, who

    def __enter__(self) -> RunLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+")
        end = time.monotonic() + PATIENCE_S
        while not self._take():
            if time.monotonic() > end:
                self._file.close()
                raise ConfigError(
                    f"another {self.who} works in {self.path.parent.parent} ({describe(holder(self.path))})",
                    next="eagle3-data status, or wait for it to end",
                )
            time.sleep(POLL_S)
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        self._file.flush()
        return self

    def _take(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.truncate(0)
        self._file.close()


def holder(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except (OSError, ValueError):
        return {}


def describe(found: dict[str, Any]) -> str:
    return f"pid {found.get('pid', '?')} on {found.get('host', '?')}"


def is_held(folder: Path) -> bool:
    """Whether a builder is alive in `folder`, asked of the kernel."""
    try:
        with open(work_folder(folder) / "lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except OSError:
        return False
