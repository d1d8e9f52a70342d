"""The same samples from a mirror: any fsspec URL, or a hub repository, read by byte ranges."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import Any

import fsspec
import pyarrow.parquet as pq
import torch

from eagle3_data.errors import ConfigError, DatasetUnavailable, ShardCorrupt
from eagle3_data.manifest import MANIFEST, Manifest
from eagle3_data.shards.index import INDEX_SCHEMA
from eagle3_data.shards.reader import columns_at
from eagle3_data.shards.table import SampleTable


def mirror_url(mirror: str, revision: str | None = None) -> str:
    """An fsspec URL stays as it is; `org/name` means that data set repository on the hub."""
    if "://" in mirror:
        return mirror.rstrip("/")
    return f"hf://datasets/{mirror}{'@' + revision if revision else ''}"


@functools.lru_cache(maxsize=8)
def filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """One connection pool per mirror and process."""
    fs, path = fsspec.core.url_to_fs(url)
    return fs, path


class RemoteShardSet(SampleTable):
    """Looks like `ShardSet`. Pickles as its URL and index, so that every process opens its own connections."""

    @property
    def url(self) -> str:
        return self.where

    @classmethod
    def open(cls, mirror: str, revision: str | None = None) -> RemoteShardSet:
        """Raises DatasetUnavailable when the mirror cannot be reached or holds no build."""
        url = mirror_url(mirror, revision)
        try:
            fs, root = filesystem(url)
            manifest = Manifest.parse(fs.cat_file(f"{root}/{MANIFEST}").decode(), f"{url}/{MANIFEST}")
            data = fs.cat_file(f"{root}/index/{manifest.split}.parquet")
        except ConfigError:
            raise
        except Exception as error:  # each filesystem has errors of its own
            raise DatasetUnavailable(
                f"mirror {mirror}: {type(error).__name__}: {error}", next="check the name, the network and your token"
            ) from error
        return cls(url, manifest, pq.read_table(io.BytesIO(data), schema=INDEX_SCHEMA))

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteShardSet, (self.where, self.manifest, self.index)

    def read(self, i: int, columns: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """One ranged request per sample."""
        wanted = self.wanted(columns)
        fs, root = filesystem(self.url)
        start, nbytes = int(self.offsets[i]), int(self.nbytes[i])
        data = fs.cat_file(f"{root}/data/{self.shard_of(i)}", start=start, end=start + nbytes)
        if len(data) != nbytes:
            raise ShardCorrupt(f"{self.shard_of(i)}, sample {self.keys[i]}: {len(data)} of {nbytes} bytes came")
        return columns_at(memoryview(bytearray(data)), 0, nbytes, wanted, self.capture)
