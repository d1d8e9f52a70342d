"""The index: one row per sample, so that any sample is one seek away. Parquet, outside `data/`.

While a build runs there is one part per shard (`index/parts/{shard}.parquet`), written before the shard gets its final
name; a finished build has `index/{split}.parquet`. Rows follow the shards and, inside a shard, the file.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_data import durable
from eagle3_data.errors import ShardCorrupt
from eagle3_data.manifest import Manifest, ShardRow

INDEX_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("id", pa.string()),
        ("shard", pa.string()),
        ("offset", pa.int64()),
        ("nbytes", pa.int64()),
        ("tokens", pa.int32()),
        ("supervised", pa.int32()),
        ("next_token", pa.int32()),
        ("checksum", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class IndexRow:
    """`offset` and `nbytes`: the safetensors member's data in the shard, in bytes."""

    key: str
    id: str
    shard: str
    offset: int
    nbytes: int
    tokens: int
    supervised: int
    next_token: int
    checksum: str


def part_path(folder: Path, shard: str) -> Path:
    return folder / "index" / "parts" / f"{shard.removesuffix('.tar')}.parquet"


def whole_path(folder: Path, split: str) -> Path:
    return folder / "index" / f"{split}.parquet"


def write_part(folder: Path, shard: ShardRow, rows: Sequence[IndexRow]) -> None:
    """Durable, and before the shard's rename: `adopt` needs it after a crash between the two."""
    path = part_path(folder, shard.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = INDEX_SCHEMA.with_metadata({"shard": shard.model_dump_json()})
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=schema)
    pq.write_table(table, durable.hidden(path))
    durable.replace(path)


def read_part(folder: Path, name: str) -> ShardRow | None:
    """The row that a sealed shard would have had; None when no part was written."""
    path = part_path(folder, name)
    if not path.exists():
        return None
    metadata = pq.read_schema(path).metadata or {}
    return ShardRow.model_validate(json.loads(metadata[b"shard"]))


def consolidate(folder: Path, manifest: Manifest) -> None:
    """Write `index/{split}.parquet` from what is there now, then drop the parts. Safe to repeat."""
    table = read_index(folder, manifest)
    path = whole_path(folder, manifest.split)
    path.parent.mkdir(parents=True, exist_ok=True)  # no part made it when nothing was saved
    pq.write_table(table, durable.hidden(path))
    durable.replace(path)
    parts = folder / "index" / "parts"
    for part in parts.glob("*.parquet"):
        part.unlink()
    if parts.exists() and not any(parts.iterdir()):
        parts.rmdir()


def read_index(folder: Path, manifest: Manifest) -> pa.Table:
    """All rows of the shards in the manifest, in its order.

    Raises ShardCorrupt when a shard has no rows, or a file of the index is damaged.
    """
    try:
        return _read_index(folder, manifest)
    except FileNotFoundError:  # a builder that ends just now has put the parts into the whole
        pass
    try:
        return _read_index(folder, manifest)
    except FileNotFoundError as error:
        name = Path(error.filename or "").stem
        raise ShardCorrupt(
            f"shard {name}.tar is in the manifest and not in the index", next="eagle3-data verify"
        ) from None


def _read_index(folder: Path, manifest: Manifest) -> pa.Table:
    whole, tables, have = whole_path(folder, manifest.split), [], set()
    parts = [part_path(folder, row.name) for row in manifest.shards]
    if whole.exists() and not all(path.exists() for path in parts):
        table = _read_file(whole)
        have = set(table.column("shard").unique().to_pylist())
        listed = {row.name for row in manifest.shards}
        if not have <= listed:
            table = table.filter(pa.compute.is_in(table.column("shard"), pa.array(sorted(listed))))
        tables.append(table)
    for row, path in zip(manifest.shards, parts, strict=True):
        if row.name in have:
            continue
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "no index part", str(path))
        tables.append(_read_file(path))
    return pa.concat_tables(tables) if tables else INDEX_SCHEMA.empty_table()


def _read_file(path: Path) -> pa.Table:
    try:
        return pq.read_table(path, schema=INDEX_SCHEMA)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the operating system; damaged pages are an OSError of Arrow's, without a number
        raise ShardCorrupt(
            f"{path} is damaged: {' '.join(str(error).split())[:200]}",
            next="put it back from a copy or a mirror (eagle3-data pull); the shards themselves may be sound",
        ) from error
