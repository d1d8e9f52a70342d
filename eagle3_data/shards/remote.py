"""The same samples from a mirror: an HTTP(S) folder, a hub repository or any fsspec URL, read by byte ranges.

Without a cache each sample is one range (or the ranges of the named columns), fetched in parallel parts into the
memory that its tensors live in. With a cache, shards are fetched whole, kept on the local disk and mapped, as many as
there is room for; the samples of the others go on being read by ranges.
"""

from __future__ import annotations

import functools
import io
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from eagle3_data.errors import ConfigError, DatasetUnavailable, ShardCorrupt
from eagle3_data.manifest import MANIFEST, Manifest
from eagle3_data.patience import Patience
from eagle3_data.protocol import AUX
from eagle3_data.shards.cache import CacheConfig, ShardCache, choose_cache
from eagle3_data.shards.codec import decode
from eagle3_data.shards.fetch import OPENING, Fetcher
from eagle3_data.shards.index import INDEX_SCHEMA
from eagle3_data.shards.layout import header_bytes, remote_path
from eagle3_data.shards.reader import MAX_HEADER_BYTES, Layout, columns_at, parse_header, view_of
from eagle3_data.shards.sources import Access, mirror_url
from eagle3_data.shards.stored import part_names, stored_plainly
from eagle3_data.shards.table import SampleTable

LAYOUTS = 4096
"""Parsed headers that are kept, for reads of single columns."""
FULL_S = 30.0
"""A full cache is not asked for room again for so long."""


class RemoteShardSet(SampleTable):
    """Looks like `ShardSet`. Pickles as its URL and index, so that every process opens its own connections."""

    def __init__(
        self,
        url: str,
        manifest: Manifest,
        index: pa.Table,
        cache: CacheConfig | None = None,
        access: Access | None = None,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(url, manifest, index)
        self.cache_config, self._access, self._patience = cache, access, patience
        self.fetcher = Fetcher(url, access, patience)
        self.cache = ShardCache(cache) if cache else None
        self._shards = {row.name: row for row in manifest.shards}
        self._own = frozenset(row.xxh3 for row in manifest.shards)
        self._full_until = 0.0
        self._layout = functools.lru_cache(LAYOUTS)(self._fetch_layout)
        if cache and max((row.nbytes for row in manifest.shards), default=0) > cache.limit_bytes:
            raise ConfigError(
                f"the shard cache's limit of {cache.limit_bytes:,} bytes is below one shard of {url}",
                next="a larger limit, or no cache: samples are then read by ranges",
            )

    @property
    def url(self) -> str:
        return self.where

    @property
    def remote(self) -> bool:
        return True

    @classmethod
    def open(
        cls,
        mirror: str,
        revision: str | None = None,
        *,
        cache: CacheConfig | None = None,
        access: Access | None = None,
        patience: Patience | None = None,
    ) -> RemoteShardSet:
        """`mirror`: `org/name` on the hub or a URL; its branch is pinned to the commit that it is now.

        Raises DatasetUnavailable when the mirror cannot be reached or holds no build, ConfigError when its manifest is
        none, ShardCorrupt when its index is not one of that manifest.
        """
        fetcher = Fetcher(mirror_url(mirror, revision), access, patience or OPENING)
        text = fetcher.read(MANIFEST).decode(errors="replace")
        manifest = Manifest.parse(text, f"{fetcher.url}/{MANIFEST}")
        data = fetcher.read(f"index/{manifest.split}.parquet")
        try:
            index = pq.read_table(io.BytesIO(data), schema=INDEX_SCHEMA)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ShardCorrupt(f"{fetcher.url}: its index is not one of this format: {error}") from error
        return cls(fetcher.url, manifest, index, cache, access, patience)

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.where, self.manifest, self.index, self.cache_config, self._access, self._patience)
        return RemoteShardSet, state

    def read(self, i: int, columns: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """From the cache, else one range for all columns; the header and then their ranges for some."""
        wanted = self.wanted(columns)
        try:
            mapped = self._mapped(i, AUX in wanted)  # most of the bytes: the shard is worth having
            if mapped is not None:
                tensors = columns_at(mapped, int(self.offsets[i]), int(self.nbytes[i]), wanted, self.capture)
            elif len(wanted) == len(self.columns):
                tensors = self._whole(i, wanted)
            else:
                names = [part for column in wanted for part in part_names(self.capture, column)]
                stored = self._ranges(i, names, {})
                tensors = {column: decode(self.capture, column, stored) for column in wanted}
            return self.checked(i, tensors)
        except ShardCorrupt as error:
            raise ShardCorrupt(f"{self.shard_of(i)}, sample {self.keys[i]}: {error.message}", next=error.next) from None

    def read_into(self, i: int, out: Mapping[str, torch.Tensor]) -> None:
        """Straight from the connection into `out`; cached shards are copied, encoded columns decoded and copied."""
        if not stored_plainly(self.capture, out) or self._mapped(i, AUX in out) is not None:
            super().read_into(i, out)
            return
        self._check_out(i, out)
        try:
            self._ranges(i, tuple(out), out)
        except ShardCorrupt as error:
            raise ShardCorrupt(f"{self.shard_of(i)}, sample {self.keys[i]}: {error.message}", next=error.next) from None

    def _mapped(self, i: int, fetch: bool) -> Any:
        """The shard's bytes when the cache has them; with `fetch` they are fetched where there is room.

        Shards of this data set never make room for each other: with room for a tenth of them, a tenth of every epoch
        is read here, where the oldest use first would throw each one out just before it is wanted again.
        """
        if self.cache is None:
            return None
        row = self._shards[self.shard_of(i)]
        found = self.cache.map(row)
        if found is None and fetch and time.monotonic() >= self._full_until:
            found = self.cache.get(row, self.fetcher, keep=self._own)
            if found is None:
                self._full_until = time.monotonic() + FULL_S
        return found

    def _whole(self, i: int, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        start, nbytes = int(self.offsets[i]), int(self.nbytes[i])
        memory = torch.empty(nbytes, dtype=torch.uint8)
        view = memoryview(memory.numpy())  # type: ignore[arg-type]
        self.fetcher.read_into(self._path(i), [(start, view)])
        return columns_at(view, 0, nbytes, wanted, self.capture)

    def _ranges(self, i: int, wanted: Sequence[str], out: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The named stored tensors, into `out` where it has them (then perhaps their first rows alone)."""
        layout, start = self._layout(i), int(self.offsets[i])
        tensors, ranges = {}, []
        for name in wanted:
            if name not in layout:
                raise ShardCorrupt(f"no tensor {name}")
            dtype, shape, low, _ = layout[name]
            target = out.get(name)
            if target is None:
                target = torch.empty(shape, dtype=dtype)
            elif target.dtype != dtype or target.shape[1:] != torch.Size(shape[1:]):
                raise ShardCorrupt(f"{name} is {dtype} {shape}, expected {target.dtype} {list(target.shape)}")
            tensors[name] = target
            ranges.append((start + low, view_of(target)))
        self.fetcher.read_into(self._path(i), [item for item in ranges if len(item[1])])
        return tensors

    def _fetch_layout(self, i: int) -> Layout:
        start, nbytes = int(self.offsets[i]), int(self.nbytes[i])
        head = self._bytes(i, start, min(header_bytes(self.capture), nbytes))
        size = 8 + int.from_bytes(head[:8], "little")
        if size > len(head):
            if size > min(MAX_HEADER_BYTES, nbytes):
                raise ShardCorrupt(f"safetensors header claims {size - 8} bytes in a member of {nbytes}")
            head += self._bytes(i, start + len(head), size - len(head))
        return parse_header(head, nbytes)

    def _bytes(self, i: int, start: int, count: int) -> bytes:
        data = bytearray(count)
        self.fetcher.read_into(self._path(i), [(start, memoryview(data))])
        return bytes(data)

    def _path(self, i: int) -> str:
        return remote_path(self.shard_of(i))


def open_samples(
    where: str | os.PathLike[str],
    *,
    revision: str | None = None,
    shard_cache: str | os.PathLike[str] | None = None,
    shard_cache_size: int | str | None = None,
    token: str | bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SampleTable:
    """A build folder, or a mirror of one (`org/name` on the hub, or a URL): what training and `load_dataset` read.

    `shard_cache`: keep whole shards of mirrors in that folder, at most `shard_cache_size` of them (bytes, or a text
    like '100GB'; oldest use out first); None: what $EAGLE3_DATA_SHARD_CACHE names, else samples are read by ranges.
    Raises ConfigError, DatasetUnavailable, ShardCorrupt as `ShardSet.open` and `RemoteShardSet.open` do.
    """
    from eagle3_data.shards.reader import ShardSet

    text, cache, access = (
        os.fspath(where),
        choose_cache(shard_cache, shard_cache_size),
        Access.of(token, storage_options),
    )
    if (Path(text) / MANIFEST).exists():
        return ShardSet.open(text, cache, access)
    if "://" not in text and (Path(text).is_absolute() or text.count("/") != 1):
        raise DatasetUnavailable(
            f"{text} is neither a build folder nor a mirror", next="a folder, ORG/NAME on the hub, or a URL"
        )
    return RemoteShardSet.open(text, revision, cache=cache, access=access)
