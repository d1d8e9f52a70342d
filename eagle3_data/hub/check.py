"""`eagle3-data verify hf://datasets/ORG/NAME`: is a mirror what its manifest says? By checksums; tensors stay there.

A hub gives the sha256 of every shard, so nothing but the manifest and the index is downloaded. Stores without are
read through, without keeping anything.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_data.hub.digest import remote_digest
from eagle3_data.hub.mirror import Mirror, RemoteFile, manifest_of
from eagle3_data.hub.notes import deleted_shards
from eagle3_data.manifest import Manifest, ShardRow
from eagle3_data.shards.index import INDEX_SCHEMA
from eagle3_data.shards.layout import remote_path


@dataclass(slots=True)
class MirrorReport:
    url: str
    shards: int = 0
    samples: int = 0
    tokens: int = 0
    nbytes: int = 0
    read_bytes: int = 0
    """Shard bytes that had to be downloaded to check them: 0 on a hub."""
    complete: bool = False
    """Whether the manifest says that the build is complete."""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def check_mirror(mirror: Mirror, *, on_shard: Callable[[ShardRow], None] = lambda row: None) -> MirrorReport:
    """`mirror` is open. Problems are collected; only a mirror without a manifest raises (MirrorError, ConfigError)."""
    manifest = manifest_of(mirror)
    report = MirrorReport(mirror.url, len(manifest.shards), manifest.saved, manifest.tokens, manifest.nbytes)
    report.complete = manifest.state == "complete"
    listing = mirror.listing()
    for row in manifest.shards:
        problem = _check_shard(mirror, row, listing.get(remote_path(row.name)), report)
        if problem:
            report.problems.append(f"{row.name}: {problem}")
        on_shard(row)
    known = {remote_path(row.name) for row in manifest.shards}
    report.problems += [f"{path} is not in the manifest" for path in sorted(listing) if path not in known]
    names = [row.name for row in manifest.shards]
    report.problems += [f"{name} is listed twice" for name in sorted({name for name in names if names.count(name) > 1})]
    report.problems += _check_index(mirror, manifest)
    return report


def check_removed(mirror: Mirror, folder: Path) -> list[str]:
    """Whether `mirror` has the shards that were removed from `folder` because of it, as the folder's manifest says.

    Raises as `check_mirror` does.
    """
    gone = {name for name, url in deleted_shards(folder).items() if url == mirror.url}
    rows = [row for row in Manifest.load(folder).shards if row.name in gone]
    published = {row.name: row for row in manifest_of(mirror).shards}
    listing, report, problems = mirror.listing(), MirrorReport(mirror.url), []
    for row in rows:
        there = published.get(row.name)
        if there is None or there.xxh3 != row.xxh3:
            problem = "its manifest does not list this shard with the checksum that it had here"
        else:
            problem = _check_shard(mirror, there, listing.get(remote_path(row.name)), report)
        if problem:
            problems.append(f"{row.name} in {mirror.url}: {problem}")
    return problems


def _check_shard(mirror: Mirror, row: ShardRow, found: RemoteFile | None, report: MirrorReport) -> str:
    if found is None:
        return "not in the mirror"
    if found.nbytes != row.nbytes:
        return f"{found.nbytes:,} bytes, the manifest says {row.nbytes:,}"
    if found.sha256 and row.sha256:
        return "" if found.sha256 == row.sha256 else f"sha256 {found.sha256}, the manifest says {row.sha256}"
    digest = remote_digest(mirror, found.path, row.nbytes)
    report.read_bytes += row.nbytes
    if digest.xxh3 != row.xxh3:
        return f"checksum {digest.xxh3}, the manifest says {row.xxh3}"
    return ""


def _check_index(mirror: Mirror, manifest: Manifest) -> list[str]:
    """The index must have each shard's samples and tokens, no key twice, and offsets inside the shard."""
    path = f"index/{manifest.split}.parquet"
    content = mirror.read(path)
    if content is None:
        return [f"{path} is missing"]
    try:
        table = pq.read_table(io.BytesIO(content), schema=INDEX_SCHEMA)
    except (pa.ArrowException, OSError, ValueError) as error:
        return [f"{path} is not an index: {error}"]
    problems, keys = [], table.column("key").to_pylist()
    if len(set(keys)) != len(keys):
        problems.append(f"{path}: {len(keys) - len(set(keys))} keys occur twice")
    samples: dict[str, list[int]] = {row.name: [0, 0, 0] for row in manifest.shards}
    for row in table.select(["shard", "offset", "nbytes", "tokens"]).to_pylist():
        if row["shard"] not in samples:
            problems.append(f"{path}: a sample lies in {row['shard']}, which the manifest does not list")
            continue
        count = samples[row["shard"]]
        count[0], count[1] = count[0] + 1, count[1] + row["tokens"]
        count[2] = max(count[2], row["offset"] + row["nbytes"])
    for shard in manifest.shards:
        found = samples[shard.name]
        if (found[0], found[1]) != (shard.samples, shard.tokens) or found[2] > shard.nbytes:
            problems.append(
                f"{path}: {shard.name} has {found[0]} samples, {found[1]} tokens, {found[2]} bytes; "
                f"the manifest says {shard.samples}, {shard.tokens}, {shard.nbytes}"
            )
    return problems
