"""Where `verify` reads a build: a folder, or a mirror whose shards come through a scratch folder one by one."""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from eagle3_data.errors import ShardCorrupt
from eagle3_data.hub.mirror import RemoteFile, make_mirror
from eagle3_data.hub.notes import deleted_shards
from eagle3_data.hub.patience import Patience
from eagle3_data.manifest import FAILURES, Manifest
from eagle3_data.shards.index import read_index
from eagle3_data.shards.remote import RemoteShardSet


class Source(Protocol):
    """One build, read only."""

    where: str

    def manifest(self) -> Manifest: ...
    def index(self, manifest: Manifest) -> pa.Table: ...
    def shard(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """The shard as a local file while the context lasts. Raises OSError or ShardCorrupt."""

    def shard_names(self) -> list[str]:
        """Shards that are there, in the manifest or not."""

    def elsewhere(self) -> set[str]:
        """Shards that are not there because a mirror confirmed them."""

    def failures(self) -> list[dict[str, Any]]: ...


class FolderSource:
    def __init__(self, folder: Path) -> None:
        self.folder, self.where = folder, str(folder)

    def manifest(self) -> Manifest:
        return Manifest.load(self.folder)

    def index(self, manifest: Manifest) -> pa.Table:
        return read_index(self.folder, manifest)

    @contextlib.contextmanager
    def shard(self, name: str) -> Iterator[Path]:
        yield self.folder / "data" / name

    def shard_names(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "data").glob("*.tar"))

    def elsewhere(self) -> set[str]:
        return {name for name in deleted_shards(self.folder) if not (self.folder / "data" / name).exists()}

    def failures(self) -> list[dict[str, Any]]:
        path = self.folder / FAILURES
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class MirrorSource:
    """`hf://datasets/org/name` or any fsspec URL; takes as much scratch space as shards are checked at once."""

    def __init__(self, url: str) -> None:
        self.where, self._data = url, RemoteShardSet.open(url)
        self._mirror = make_mirror(self._data.url, Patience())  # at the commit that the data was opened at
        self._mirror.open(create=False)

    def manifest(self) -> Manifest:
        return self._data.manifest

    def index(self, manifest: Manifest) -> pa.Table:
        return self._data.index

    @contextlib.contextmanager
    def shard(self, name: str) -> Iterator[Path]:
        if name not in self._listed:
            raise ShardCorrupt("not in the mirror")
        listed = self._listed[name]
        with tempfile.TemporaryDirectory(prefix="eagle3-verify-") as scratch:
            path = Path(scratch) / name
            path.touch()
            if listed.nbytes:
                os.truncate(path, listed.nbytes)
                with open(path, "r+b") as file:
                    target = mmap.mmap(file.fileno(), 0)  # closed by the garbage collector, as an error may hold it
                self._data.fetcher.read_into(listed.path, [(0, memoryview(target))])
            yield path

    def shard_names(self) -> list[str]:
        return sorted(self._listed)

    def elsewhere(self) -> set[str]:
        return set()

    def failures(self) -> list[dict[str, Any]]:
        text = self._mirror.read(FAILURES)
        return [json.loads(line) for line in text.splitlines()] if text else []

    @functools.cached_property
    def _listed(self) -> dict[str, RemoteFile]:
        """By name; a mirror of many shards has them in several folders."""
        listing = self._mirror.listing()
        return {path.rpartition("/")[2]: file for path, file in listing.items() if path.endswith(".tar")}


def open_source(where: str | Path) -> Source:
    """Raises ConfigError or DatasetUnavailable when no build lies there."""
    return MirrorSource(where) if isinstance(where, str) and "://" in where else FolderSource(Path(where))
