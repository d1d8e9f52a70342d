"""What the stub hub keeps: repositories as chains of commits, and large files by their sha256."""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LARGE = (".tar", ".parquet", ".safetensors")


class Conflict(Exception):
    """Somebody else committed since the parent that a commit names."""


class Incomplete(Exception):
    """A commit names a large file that was never uploaded, or not with those bytes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a tree. `oid`: git blob id, or sha256 when it is a large file."""

    oid: str
    size: int
    large: bool
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    tree: dict[str, Entry]


@dataclass(slots=True)
class Repository:
    commits: list[Commit] = field(default_factory=list)

    @property
    def head(self) -> Commit:
        return self.commits[-1]

    def at(self, revision: str) -> Commit | None:
        if revision in ("main", "refs/heads/main", "HEAD"):
            return self.head
        return next((commit for commit in self.commits if commit.oid == revision), None)


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Store:
    """Thread-safe. `received[oid]`: bytes of a large file that came in over all its uploads, broken ones included."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.repositories: dict[str, Repository] = {}
        self.received: Counter[str] = Counter()
        self.sizes: dict[str, int] = {}
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        (folder / "parts").mkdir(exist_ok=True)

    def blob(self, oid: str) -> Path:
        return self.folder / "blobs" / oid

    def part(self, oid: str, number: int) -> Path:
        return self.folder / "parts" / f"{oid}.{number}"

    def create(self, name: str) -> bool:
        """False when it is there already."""
        with self.lock:
            if name in self.repositories:
                return False
            self.repositories[name] = Repository([Commit(uuid.uuid4().hex + "00000000", None, "initial commit", {})])
            return True

    def take(self, oid: str, pieces: Iterable[bytes], target: Path) -> str:
        """Write what comes, counting every byte at once; returns its sha256."""
        digest, temporary = hashlib.sha256(), target.with_name(f"{target.name}.{uuid.uuid4().hex}")
        try:
            with open(temporary, "wb") as file:
                for piece in pieces:
                    with self.lock:
                        self.received[oid] += len(piece)
                    digest.update(piece)
                    file.write(piece)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        return digest.hexdigest()

    def join(self, oid: str, numbers: Iterable[int]) -> bool:
        """Put parts together; False when they do not give `oid`."""
        parts = [self.part(oid, number) for number in numbers]
        content = b"".join(part.read_bytes() for part in parts)
        if hashlib.sha256(content).hexdigest() != oid:
            return False
        self.blob(oid).write_bytes(content)
        for part in parts:
            part.unlink()
        return True

    def commit(
        self, name: str, parent: str | None, title: str, changes: list[dict[str, Any]], anything: bool
    ) -> Commit:
        """`anything`: large files need not have come through this server (they went to a xet store)."""
        with self.lock:
            repository = self.repositories[name]
            if parent not in (None, repository.head.oid):
                raise Conflict(f"head is {repository.head.oid}")
            tree = dict(repository.head.tree)
            for change in changes:
                path = change["path"]
                if change["kind"] == "delete":
                    tree.pop(path, None)
                elif change["kind"] == "large":
                    oid, size = change["oid"], change["size"]
                    blob = self.blob(oid)
                    if not anything and not (blob.exists() and blob.stat().st_size == size):
                        raise Incomplete(path)
                    tree[path] = Entry(oid, size, large=True)
                else:
                    content = change["content"]
                    tree[path] = Entry(git_oid(content), len(content), large=False, content=content)
            commit = Commit(uuid.uuid4().hex + "11111111", repository.head.oid, title, tree)
            repository.commits.append(commit)
            return commit

    def read(self, entry: Entry, start: int, end: int) -> bytes:
        if not entry.large:
            return entry.content[start:end]
        with open(self.blob(entry.oid), "rb") as file:
            file.seek(start)
            return file.read(end - start)
