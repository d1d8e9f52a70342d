"""Shards of a build folder that are not in it any more: `push --delete-local` removed them, their mirror has them.

The folder keeps manifest and index, and the notes of its pushes name the mirror, so that its samples are read as
before: by ranges, or through the shard cache, which holds what comes to the folder's own checksums.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from eagle3_data.errors import ShardCorrupt
from eagle3_data.hub.notes import mirrored_shards
from eagle3_data.manifest import Manifest

if TYPE_CHECKING:
    from eagle3_data.shards.cache import CacheConfig
    from eagle3_data.shards.remote import RemoteShardSet
    from eagle3_data.shards.sources import Access


class FarShards:
    """Opens the mirrors of one folder's shards when a sample of them is asked for."""

    def __init__(
        self, folder: Path, manifest: Manifest, index: pa.Table, cache: CacheConfig | None, access: Access | None
    ) -> None:
        self._folder, self._manifest, self._index, self._cache, self._access = folder, manifest, index, cache, access
        self._mirrors: dict[str, str] = {}
        self._tables: dict[str, RemoteShardSet] = {}

    def table(self, shard: str) -> RemoteShardSet:
        """The samples of the folder, by the same numbers, as the mirror of `shard` has them.

        Raises ShardCorrupt when no push noted a mirror that has it.
        """
        if shard not in self._mirrors:
            self._mirrors = mirrored_shards(self._folder)  # a push beside us may have removed it just now
        if shard not in self._mirrors:
            raise ShardCorrupt(
                f"{shard} is in the manifest of {self._folder} and not in its data/, and no push from here noted it",
                next=f"eagle3-data pull MIRROR {self._folder} (ORG/NAME or a URL that has it) fetches what is missing",
            )
        url = self._mirrors[shard]
        if url not in self._tables:
            from eagle3_data.shards.remote import RemoteShardSet

            self._tables[url] = RemoteShardSet(url, self._manifest, self._index, self._cache, self._access)
        return self._tables[url]
