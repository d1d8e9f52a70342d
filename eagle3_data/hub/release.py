"""What a commit publishes beside its shards: manifest, index, card and failures, of exactly what is there."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from eagle3_data.card import CARD, LICENSE, Publication, read_license, render_card
from eagle3_data.errors import ManifestMismatch, MirrorError, ShardCorrupt
from eagle3_data.hub.mirror import Mirror
from eagle3_data.manifest import FAILURES, MANIFEST, Manifest, ShardRow
from eagle3_data.shards.index import read_index
from eagle3_data.shards.layout import PER_FOLDER, shard_number

TRIES = 5
"""A build may consolidate its index while it is read."""


@dataclass(frozen=True, slots=True)
class Published:
    """The state of a mirror: its manifest and card, None before the first push."""

    manifest: Manifest | None
    card: str | None

    @classmethod
    def read(cls, mirror: Mirror) -> Published:
        manifest, card = mirror.read(MANIFEST), mirror.read(CARD)
        parsed = Manifest.parse(manifest.decode(), f"{mirror.url}/{MANIFEST}") if manifest else None
        return cls(parsed, card.decode(errors="replace") if card else None)

    def check(self, local: Manifest, url: str) -> None:
        """Raises ManifestMismatch when the mirror holds another data set, or other shards of this one."""
        if self.manifest is None:
            return
        if self.manifest.run != local.run:
            raise ManifestMismatch(
                f"{url} holds another build ({self.manifest.dataset}, run {self.manifest.run}; here {local.run})",
                next="push to another mirror; a published data set is never overwritten",
            )
        here = {row.name: row.xxh3 for row in local.shards}
        for row in self.manifest.shards:
            if here.get(row.name) != row.xxh3:
                raise ManifestMismatch(
                    f"{url} has {row.name} with checksum {row.xxh3}, here it is {here.get(row.name, 'not listed')}",
                    next="push the folder that the mirror was made from",
                )

    def digests(self) -> dict[str, str]:
        """sha256 of the published shards, by name."""
        rows = self.manifest.shards if self.manifest else ()
        return {row.name: row.sha256 for row in rows if row.sha256}


def publication(published: Published, where: str, license: str | None) -> Publication:
    """`license` as asked for, else what the published card says."""
    kept = read_license(published.card) if published.card else None
    return Publication(where=where, license=license or kept or LICENSE)


def release(folder: Path, digests: Mapping[str, str], about: Publication) -> dict[str, bytes]:
    """Path -> content of the small files, for the shards in `digests` (name -> sha256)."""
    for attempt in range(TRIES):
        manifest = subset(Manifest.load(folder), digests)
        try:
            index = read_index(folder, manifest)
            break
        except (ShardCorrupt, OSError):
            if attempt == TRIES - 1:
                raise
    buffer = io.BytesIO()
    pq.write_table(index, buffer)
    folders = any(shard_number(row.name) >= PER_FOLDER for row in manifest.shards)
    about = Publication(where=about.where, license=about.license, folders=folders)
    files = {
        f"index/{manifest.split}.parquet": buffer.getvalue(),
        CARD: render_card(manifest, about).encode(),
        MANIFEST: (manifest.model_dump_json(indent=1) + "\n").encode(),
    }
    failures = folder / FAILURES
    if failures.exists():
        files[FAILURES] = failures.read_bytes()
    return files


def subset(manifest: Manifest, digests: Mapping[str, str]) -> Manifest:
    """The manifest of the shards in `digests`, with their sha256; complete only when none is missing."""
    rows = [_with_digest(row, digests[row.name]) for row in manifest.shards if row.name in digests]
    if len(rows) != len(digests):
        raise MirrorError("the mirror would list shards that the build does not", next="eagle3-data verify")
    whole = manifest.state == "complete" and len(rows) == len(manifest.shards)
    return manifest.model_copy(update={"shards": tuple(rows), "state": "complete" if whole else "building"})


def _with_digest(row: ShardRow, sha256: str) -> ShardRow:
    return row.model_copy(update={"sha256": sha256})
