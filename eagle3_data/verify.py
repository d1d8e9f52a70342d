"""`eagle3-data verify`: is this folder what its manifest says? Without a GPU, without a server, shard by shard."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash

from eagle3_data.capture import TOP_IDS, TOP_LOGPROBS, CaptureSpec
from eagle3_data.errors import Eagle3Error, ShardCorrupt
from eagle3_data.failures import Failure, disagreement, read_failures
from eagle3_data.hub.notes import deleted_shards
from eagle3_data.manifest import FAILURES, Manifest, ShardRow
from eagle3_data.protocol import IDS, MASK, ids_digest
from eagle3_data.shards.codec import decode
from eagle3_data.shards.index import read_index
from eagle3_data.shards.layout import SampleRecord
from eagle3_data.shards.reader import tensors_at, view_of
from eagle3_data.shards.stored import state_columns, stored_states
from eagle3_data.shards.table import check_index
from eagle3_data.shards.tarwalk import TarSample, samples


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong; `shard` and `last_good_key` where it has a place."""

    what: str
    shard: str = ""
    last_good_key: str = ""

    def __str__(self) -> str:
        place = f"{self.shard}: " if self.shard else ""
        after = f" (last good sample: {self.last_good_key or 'none'})" if self.shard else ""
        return f"{place}{self.what}{after}"


@dataclass(slots=True)
class VerifyReport:
    where: str
    shards: int = 0
    mirrored: int = 0
    """Shards that are not here because a mirror confirmed them (`push --delete-local`); `check_mirror` checks those."""
    samples: int = 0
    tokens: int = 0
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(slots=True)
class _ShardResult:
    row: ShardRow
    keys: list[str] = field(default_factory=list)
    tokens: int = 0
    problem: Problem | None = None


def verify(folder: Path, *, on_shard: Callable[[ShardRow], None] = lambda row: None, workers: int = 2) -> VerifyReport:
    """Check every byte of a build folder. Problems are collected, not raised; only a missing manifest raises.

    Checked: file size and checksum; archive form and adjacency; records against index; widths, dtypes and row counts;
    ids digest; states against the server's checksum; finite values; mask; duplicate keys; counts of the manifest;
    saved + failed + skipped == planned; rows of failed samples, by reason, none of them saved; shards on disk that the
    manifest does not know.
    """
    manifest = Manifest.load(folder)
    report = VerifyReport(str(folder), shards=len(manifest.shards))
    try:
        index = read_index(folder, manifest)
    except (Eagle3Error, OSError, pa.ArrowException) as error:
        report.problems.append(Problem(f"index: {error}"))
        index = None
    else:
        report.problems.extend(_check_order(index, manifest))
    rows = _index_rows(index)
    elsewhere = deleted_shards(folder)
    here = [row for row in manifest.shards if row.name not in elsewhere]
    report.mirrored = len(manifest.shards) - len(here)
    seen: dict[str, str] = {}
    with ThreadPoolExecutor(workers) as threads:
        checks = (threads.submit(_check_shard, folder, manifest.spec, row, rows) for row in here)
        for result in (check.result() for check in list(checks)):
            _count(report, result, seen)
            on_shard(result.row)
    report.problems.extend(_check_totals(folder, manifest, report, index))
    return report


def _check_order(index: pa.Table, manifest: Manifest) -> Iterator[Problem]:
    """What every reader refuses, and what gives the samples in another order than the shards have."""
    try:
        check_index(index, manifest)
    except ShardCorrupt as error:
        yield Problem(error.message)
        return
    places = {row.name: place for place, row in enumerate(manifest.shards)}
    found = zip(index.column("shard").to_pylist(), index.column("offset").to_pylist(), strict=True)
    for before, after in itertools.pairwise((places[shard], offset) for shard, offset in found):
        if after <= before:
            name = manifest.shards[after[0]].name
            yield Problem(f"index: the row for byte {after[1]} of {name} stands twice, or behind a later one")
            return


def _index_rows(index: pa.Table | None) -> dict[str, dict[str, object]] | None:
    return None if index is None else {str(row["key"]): row for row in index.to_pylist()}


def _count(report: VerifyReport, result: _ShardResult, seen: dict[str, str]) -> None:
    report.samples += len(result.keys)
    report.tokens += result.tokens
    report.nbytes += result.row.nbytes
    if result.problem:
        report.problems.append(result.problem)
    for key in result.keys:
        if key in seen:
            report.problems.append(Problem(f"sample {key} is also in {seen[key]}", result.row.name, key))
        seen[key] = result.row.name


def _check_shard(
    folder: Path, spec: CaptureSpec, row: ShardRow, index: dict[str, dict[str, object]] | None
) -> _ShardResult:
    result = _ShardResult(row)
    try:
        with open(folder / "data" / row.name, "rb") as file:
            # closed by the garbage collector: an error's traceback may still hold tensors over it
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for sample in samples(view):
            _check_sample(view, sample, spec, index, row.name)
            result.keys.append(sample.record.key)
            result.tokens += sample.record.tokens
        if len(view) != row.nbytes:
            raise ShardCorrupt(f"{len(view)} bytes, the manifest says {row.nbytes}")
        if xxhash.xxh3_128_hexdigest(view) != row.xxh3:
            raise ShardCorrupt("its checksum is not the manifest's")
        if (len(result.keys), result.tokens) != (row.samples, row.tokens):
            raise ShardCorrupt(
                f"{len(result.keys)} samples with {result.tokens} tokens, "
                f"the manifest says {row.samples} with {row.tokens}"
            )
    except FileNotFoundError:
        result.problem = Problem("it is in the manifest and not on disk", row.name)
    except (Eagle3Error, OSError, ValueError) as error:
        what = error.message if isinstance(error, Eagle3Error) else str(error)
        result.problem = Problem(what, row.name, result.keys[-1] if result.keys else "")
    return result


def _check_sample(
    view: mmap.mmap, sample: TarSample, spec: CaptureSpec, index: dict[str, dict[str, object]] | None, shard: str
) -> None:
    """Raises ShardCorrupt naming what is wrong with the sample."""
    record, where = sample.record, f"sample {sample.record.key}"
    names = [name for name, _, _ in stored_states(spec, record.tokens)]
    stored = tensors_at(view, sample.offset, sample.nbytes, [*names, IDS, MASK])
    tensors = {name: decode(spec, name, stored) for name, _, _ in spec.tensors(record.tokens)}
    for name, dtype, shape in spec.tensors(record.tokens):
        found = tensors[name]
        if found.dtype != getattr(torch, dtype) or tuple(found.shape) != shape:
            raise ShardCorrupt(f"{where}: {name} is {found.dtype} {list(found.shape)}, expected {dtype} {list(shape)}")
    if ids_digest(tensors[IDS].tolist()) != record.ids_digest:
        raise ShardCorrupt(f"{where}: its ids do not give its ids digest")
    if int(tensors[MASK].sum()) != record.supervised or int(tensors[MASK].max()) > 1:
        raise ShardCorrupt(f"{where}: its loss mask does not have {record.supervised} ones")
    if not spec.as_sent:
        digest = xxhash.xxh3_128()
        for name in names:
            digest.update(view_of(stored[name]))
        if digest.hexdigest() != record.stored:
            raise ShardCorrupt(f"{where}: its states are not what was stored")
    # an encoding that loses nothing is held to the server's own word, through the decoder
    for column, checksum in zip(state_columns(spec), record.checksum.split(":"), strict=False):
        if column.encoding != "fp8" and xxhash.xxh3_128_hexdigest(view_of(tensors[column.name])) != checksum:
            raise ShardCorrupt(f"{where}: its states do not give the server's checksum")
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ShardCorrupt(f"{where}: NaN or Inf in its states")
    if spec.top_k:
        _check_top(tensors[TOP_IDS], tensors[TOP_LOGPROBS], spec, where)
    _check_index(record, sample, index, shard)


def _check_top(ids: torch.Tensor, logprobs: torch.Tensor, spec: CaptureSpec, where: str) -> None:
    """Ids of the vocabulary, most probable first, together no more than one."""
    limit = spec.vocab_size or int(ids.max()) + 1
    if int(ids.min()) < 0 or int(ids.max()) >= limit:
        raise ShardCorrupt(f"{where}: a top-k id is outside the vocabulary of {limit}")
    values = logprobs.float()
    if bool((values.diff(dim=-1) > 0).any()) or bool((values.exp().sum(-1) > 1.01).any()):
        raise ShardCorrupt(f"{where}: its top-k log-probabilities are not a distribution's")


def _check_index(
    record: SampleRecord, sample: TarSample, index: dict[str, dict[str, object]] | None, shard: str
) -> None:
    if index is None:
        return
    row = index.get(record.key)
    expected = {
        "shard": shard,
        "offset": sample.offset,
        "nbytes": sample.nbytes,
        "tokens": record.tokens,
        "supervised": record.supervised,
        "next_token": record.next_token,
        "checksum": record.checksum,
        "id": record.id,
    }
    if row is None:
        raise ShardCorrupt(f"sample {record.key} is not in the index")
    for name, value in expected.items():
        if row[name] != value:
            raise ShardCorrupt(f"sample {record.key}: {name} is {value}, the index says {row[name]}")


def _check_failures(manifest: Manifest, rows: Sequence[Failure], index: pa.Table | None) -> Iterator[Problem]:
    """Every planned sample is in the index, or failed with a reason, or was skipped; none is two of these."""
    saved, skipped = manifest.saved, sum(manifest.plan.skipped.values())
    if manifest.state == "complete" and saved + len(rows) + skipped != manifest.plan.planned:
        yield Problem(f"saved {saved} + failed {len(rows)} + skipped {skipped} != planned {manifest.plan.planned}")
    if wrong := disagreement(rows, manifest):
        yield Problem(wrong)
    if index is not None and rows:
        keys = pa.array([row.key for row in rows], pa.string())
        both = index.filter(pc.is_in(index.column("key"), keys)).column("key").to_pylist()
        for key in sorted(both):
            yield Problem(f"sample {key} is in {FAILURES} and in the index")


def _check_totals(folder: Path, manifest: Manifest, report: VerifyReport, index: pa.Table | None) -> Iterator[Problem]:
    known = {row.name for row in manifest.shards}
    for name in sorted(path.name for path in (folder / "data").glob("*.tar")):
        if name not in known:
            yield Problem(f"data/{name} is not in the manifest; a resumed build adopts or replaces it")
    try:
        rows = list(read_failures(folder).values())
    except Eagle3Error as error:
        yield Problem(error.message)
    else:
        yield from _check_failures(manifest, rows, index)
    if not report.problems and not report.mirrored and report.samples != manifest.saved:
        yield Problem(f"{report.samples} samples found, the manifest says {manifest.saved}")
