"""The journal of pushes: `.build/push.jsonl`, one durable line per event, so that a killed push knows what it had done.

{"event": "hashed", "name": "train-000000.tar", "nbytes": 1073741824, "mtime_ns": 1, "sha256": "..", "xxh3": ".."}
{"event": "sent", "target": "hf://datasets/org/name", "name": "train-000000.tar", "nbytes": 1073741824}

`sent`: the mirror has the bytes and nobody sees them yet; `published`: a commit made them visible; `deleted`: the
mirror confirmed size and sha256, and the local file was removed. The mirror's own answers weigh more than these notes.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from eagle3_data import durable
from eagle3_data.hub.digest import Digest
from eagle3_data.runlock import work_folder

Event = Literal["sent", "published", "deleted"]


class PushNotes:
    """Appends are durable before they return. Thread-safe."""

    def __init__(self, folder: Path, target: str) -> None:
        self.path, self.target = work_folder(folder) / "push.jsonl", target
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._digests: dict[tuple[str, int, int], Digest] = {}
        self.done: dict[Event, dict[str, int]] = {"sent": {}, "published": {}, "deleted": {}}
        """Names of this target's shards and their bytes, by event."""
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # a killed push may have torn its last line
        durable.fsync_dir(self.path.parent)
        for line in read_lines(self.path):
            self._apply(line)

    def close(self) -> None:
        os.close(self._fd)

    def digest(self, file: Path) -> Digest | None:
        """What was computed before for the file as it is now."""
        stat = file.stat()
        return self._digests.get((file.name, stat.st_size, stat.st_mtime_ns))

    def hashed(self, file: Path, digest: Digest) -> None:
        found = {"nbytes": digest.nbytes, "sha256": digest.sha256, "xxh3": digest.xxh3}
        self._append({"event": "hashed", "name": file.name, "mtime_ns": file.stat().st_mtime_ns, **found})

    def note(self, event: Event, name: str, nbytes: int) -> None:
        self._append({"event": event, "target": self.target, "name": name, "nbytes": nbytes})

    def _append(self, line: dict[str, Any]) -> None:
        with self._lock:
            os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")
            os.fsync(self._fd)
            self._apply(line)

    def _apply(self, line: dict[str, Any]) -> None:
        if line["event"] == "hashed":
            digest = Digest(line["nbytes"], line["sha256"], line["xxh3"])
            self._digests[line["name"], line["nbytes"], line["mtime_ns"]] = digest
        elif line.get("target") == self.target and line["event"] in self.done:
            self.done[line["event"]][line["name"]] = line["nbytes"]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; a torn one is passed over."""
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "event" in line:
            yield line


def deleted_shards(folder: Path) -> dict[str, str]:
    """Shards that a push removed here, and that were not pulled again: name -> URL of the mirror that has them."""
    gone = _shards_of(folder, ("deleted",))
    return {name: url for name, url in gone.items() if not (folder / "data" / name).exists()}


def mirrored_shards(folder: Path) -> dict[str, str]:
    """Shards that a push published: name -> URL of the last mirror that got them."""
    return _shards_of(folder, ("published", "deleted"))


def _shards_of(folder: Path, events: tuple[Event, ...]) -> dict[str, str]:
    path = work_folder(folder) / "push.jsonl"
    if not path.exists():
        return {}
    return {line["name"]: line["target"] for line in read_lines(path) if line["event"] in events}
