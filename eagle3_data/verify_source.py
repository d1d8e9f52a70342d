"""Where `verify` reads a build: a folder, or a mirror whose shards come through a scratch folder one by one."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from eagle3_data.errors import ShardCorrupt
from eagle3_data.manifest import FAILURES, Manifest
from eagle3_data.shards.index import read_index
from eagle3_data.shards.reader import ShardSet
from eagle3_data.shards.remote import RemoteShardSet, filesystem
from eagle3_data.shards.table import SampleTable


class Source(Protocol):
    """One build, read only."""

    where: str

    def manifest(self) -> Manifest: ...
    def index(self, manifest: Manifest) -> pa.Table: ...
    def samples(self) -> SampleTable: ...
    def shard(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """The shard as a local file while the context lasts. Raises OSError or ShardCorrupt."""

    def shard_names(self) -> list[str]:
        """Shards that are there, in the manifest or not."""

    def failures(self) -> list[dict[str, Any]]: ...


class FolderSource:
    def __init__(self, folder: Path) -> None:
        self.folder, self.where = folder, str(folder)

    def manifest(self) -> Manifest:
        return Manifest.load(self.folder)

    def index(self, manifest: Manifest) -> pa.Table:
        return read_index(self.folder, manifest)

    def samples(self) -> SampleTable:
        return ShardSet.open(self.folder)

    @contextlib.contextmanager
    def shard(self, name: str) -> Iterator[Path]:
        yield self.folder / "data" / name

    def shard_names(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "data").glob("*.tar"))

    def failures(self) -> list[dict[str, Any]]:
        path = self.folder / FAILURES
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class MirrorSource:
    """`hf://datasets/org/name` or any fsspec URL; takes as much scratch space as shards are checked at once."""

    def __init__(self, url: str) -> None:
        self.where, self._data = url, RemoteShardSet.open(url)
        self._fs, self._root = filesystem(self._data.url)

    def manifest(self) -> Manifest:
        return self._data.manifest

    def index(self, manifest: Manifest) -> pa.Table:
        return self._data.index

    def samples(self) -> SampleTable:
        return self._data

    @contextlib.contextmanager
    def shard(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="eagle3-verify-") as scratch:
            path = Path(scratch) / name
            try:
                self._fs.get_file(f"{self._root}/data/{name}", str(path))
            except Exception as error:  # each filesystem has errors of its own
                raise ShardCorrupt(f"cannot be read from the mirror: {type(error).__name__}: {error}") from error
            yield path

    def shard_names(self) -> list[str]:
        found = self._fs.ls(f"{self._root}/data", detail=False)
        return sorted(name for path in found if (name := str(path).rsplit("/", 1)[-1]).endswith(".tar"))

    def failures(self) -> list[dict[str, Any]]:
        try:
            text = self._fs.cat_file(f"{self._root}/{FAILURES}").decode()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines()]


def open_source(where: str | Path) -> Source:
    """Raises ConfigError or DatasetUnavailable when no build lies there."""
    return MirrorSource(where) if isinstance(where, str) and "://" in where else FolderSource(Path(where))
