"""`eagle3-data merge`: the parts of a build (`--shards i/n`), each made somewhere, become one folder.

Shard names are the whole plan's, so nothing is renamed and no byte changes: files are linked (copied where parts lie
on another file system), rows joined. Repeating it is safe; a merged folder is what one machine would have made.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from eagle3_data import durable
from eagle3_data.builders.resume import PART
from eagle3_data.card import write_card
from eagle3_data.errors import ConfigError, LedgerError, ManifestMismatch, ShardCorrupt
from eagle3_data.failures import read_failures
from eagle3_data.hub.digest import file_xxh3
from eagle3_data.manifest import FAILURES, Manifest, PlanRow, ShardRow
from eagle3_data.runlock import RunLock
from eagle3_data.shards.index import read_index, whole_path


def merge(parts: Sequence[Path], out: Path, *, on_shard: Callable[[ShardRow], None] = lambda row: None) -> Manifest:
    """Join finished parts in `out`.

    Raises ConfigError for parts that are missing, double, unfinished or of no build, ManifestMismatch when two have
    been made with different settings, ShardCorrupt when a file is not what its manifest says: by its size where it is
    linked (`verify` reads it), by its checksum where it is copied.
    """
    found = [(folder, Manifest.load(folder)) for folder in parts]
    _check_parts(found)
    out.mkdir(parents=True, exist_ok=True)
    with RunLock(out):
        return _join(found, out, on_shard)


def merge_locked(parts: Sequence[Path], out: Path) -> Manifest:
    """`merge` for the holder of `out`'s lock."""
    found = [(folder, Manifest.load(folder)) for folder in parts]
    _check_parts(found)
    return _join(found, out, lambda row: None)


def _join(found: list[tuple[Path, Manifest]], out: Path, on_shard: Callable[[ShardRow], None]) -> Manifest:
    (out / "data").mkdir(exist_ok=True)
    merged = _manifest([manifest for _, manifest in found])
    homes = {row.name: folder for folder, manifest in found for row in manifest.shards}
    for row in merged.shards:
        _bring(homes[row.name] / "data" / row.name, out / "data" / row.name, row)
        on_shard(row)
    durable.fsync_dir(out / "data")
    _index(found, out, merged)
    failures = [row for folder, _ in found for row in read_failures(folder).values()]
    durable.write_text(out / FAILURES, "".join(row.to_line() for row in failures))
    if merged.saved + len(failures) != merged.plan.samples:
        raise LedgerError(f"saved({merged.saved}) + failed({len(failures)}) != samples({merged.plan.samples})")
    write_card(out, merged)
    merged.save(out)
    return merged


def _check_parts(found: list[tuple[Path, Manifest]]) -> None:
    if not found:
        raise ConfigError("no part given", next="eagle3-data merge --help")
    seen: dict[int, Path] = {}
    first, count = found[0][1], 0
    for folder, manifest in found:
        part = manifest.fingerprint.get(PART)
        if part is None:
            raise ConfigError(f"{folder} is a whole build, not a part of one", next="build parts with --shards i/n")
        index, count = (int(word) for word in part.split("/"))
        mine = {**manifest.fingerprint, PART: f"of {count}"}
        theirs = {**first.fingerprint, PART: f"of {first.fingerprint[PART].split('/')[1]}"}
        for name in sorted({*mine, *theirs}):
            if mine.get(name) != theirs.get(name):
                raise ManifestMismatch(
                    f"{folder} was built with {name} = {mine.get(name)}, {found[0][0]} with {theirs.get(name)}"
                )
        if index in seen:
            raise ConfigError(f"{folder} and {seen[index]} are both part {part}")
        if manifest.state != "complete":
            raise ConfigError(f"{folder} is not finished", next=f"eagle3-data status {folder}")
        seen[index] = folder
    if missing := [f"{i}/{count}" for i in range(count) if i not in seen]:
        raise ConfigError(f"parts missing: {', '.join(missing)}", next="name the folders of all parts")


def _manifest(parts: list[Manifest]) -> Manifest:
    plans = [part.plan for part in parts]
    failed: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for part in parts:
        failed.update(part.failed)
        skipped.update(part.plan.skipped)
    servers = {row.instance: row for part in parts for row in part.servers}
    return parts[0].model_copy(
        update={
            "run": secrets.token_hex(4),
            "state": "complete",
            "fingerprint": {name: value for name, value in parts[0].fingerprint.items() if name != PART},
            "plan": PlanRow(
                samples=sum(plan.samples for plan in plans),
                tokens=sum(plan.tokens for plan in plans),
                nbytes=sum(plan.nbytes for plan in plans),
                shards=sum(plan.shards for plan in plans),
                shard_bytes=plans[0].shard_bytes,
                skipped=dict(skipped),
            ),
            "servers": tuple(servers.values()),
            "shards": tuple(sorted((row for part in parts for row in part.shards), key=lambda row: row.name)),
            "failed": dict(failed),
        }
    )


def _bring(source: Path, target: Path, row: ShardRow) -> None:
    """Link, or copy and check. A file that is there already must be the shard."""
    if target.exists():
        if source.exists() and source.samefile(target):
            _check_size(source, target, row)
            return  # linked by a merge before
        if target.stat().st_size != row.nbytes or file_xxh3(target) != row.xxh3:
            raise ShardCorrupt(f"{target} is there and is not the shard of that name", next="merge into a new folder")
        return
    hidden = durable.hidden(target)
    hidden.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), hidden)  # a part may have its shards elsewhere, behind symbolic links
        _check_size(source, hidden, row)
    except ShardCorrupt:
        hidden.unlink()
        raise
    except FileNotFoundError:
        raise ShardCorrupt(f"{source} is in its part's manifest and not on disk") from None
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        shutil.copyfile(source, hidden)
        if file_xxh3(hidden) != row.xxh3:
            hidden.unlink()
            raise ShardCorrupt(f"{source} does not give its checksum", next="eagle3-data verify PART") from error
    durable.replace(target)


def _check_size(source: Path, linked: Path, row: ShardRow) -> None:
    if (size := linked.stat().st_size) != row.nbytes:
        raise ShardCorrupt(
            f"{source} has {size:,} bytes, its part's manifest says {row.nbytes:,}",
            next=f"eagle3-data verify {source.parent.parent}; what is damaged there is to be built or pulled again",
        )


def _index(found: list[tuple[Path, Manifest]], out: Path, merged: Manifest) -> None:
    """One table, in the order of the shards."""
    import pyarrow as pa

    tables = [read_index(folder, manifest) for folder, manifest in found]
    table = pa.concat_tables(tables)
    order = {row.name: place for place, row in enumerate(merged.shards)}
    places = pa.array([order[name] for name in table.column("shard").to_pylist()])
    table = table.append_column("place", places).append_column("row", pa.array(range(len(table))))
    table = table.sort_by([("place", "ascending"), ("row", "ascending")]).drop_columns(["place", "row"])
    path = whole_path(out, merged.split)
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, durable.hidden(path))
    durable.replace(path)
    with contextlib.suppress(OSError):
        (out / "index" / "parts").rmdir()
