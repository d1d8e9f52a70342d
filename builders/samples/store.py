"""Samples on disk: one Arrow IPC file that is memory-mapped and read row by row, and a JSON record beside it.

`samples.arrow` holds the columns of `SCHEMA`; `samples.json` the spec, the counts and the digest. Both are written
under hidden names and renamed when whole, the record last: without its record a file of samples does not count.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from eagle3_data import durable
from eagle3_data.builders.samples.policy import sample_digest
from eagle3_data.builders.samples.rows import Chunk, Drop
from eagle3_data.builders.samples.spec import SampleSpec
from eagle3_data.errors import ConfigError, InputError

FORMAT = 1
STORE = "samples.arrow"
"""In a build's work folder."""

SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("source", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: `loss_mask[t]` is 1 iff the assistant produced token t."""

    key: str
    id: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    source: str | None

    @property
    def tokens(self) -> int:
        return len(self.input_ids)

    @property
    def supervised(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleReport:
    """What went in, what was kept, what was dropped and why. `samples + sum(dropped)` is everything there was."""

    inputs: tuple[str, ...]
    form: str
    """Form of the input, as it was detected."""
    rows: int
    samples: int
    tokens: int
    supervised: int
    longest: int
    """Tokens of the longest sample."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)
    """Counts of what was done on the way: turns per thinking mode, conversations fanned out, joins."""
    seconds: float = 0.0

    @property
    def supervised_share(self) -> float:
        return self.supervised / self.tokens if self.tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        names = (f for f in SampleReport.__dataclass_fields__)
        data = {name: getattr(self, name) for name in names}
        return {**data, "inputs": list(self.inputs), "dropped": dict(self.dropped), "notes": dict(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SampleReport:
        return cls(**cast(dict[str, Any], {**data, "inputs": tuple(data["inputs"])}))


def record_path(path: Path) -> Path:
    return path.with_suffix(".json")


def drops_path(path: Path) -> Path:
    return path.with_suffix(".dropped.jsonl")


class SampleWriter:
    """Chunks to `path`; nothing is visible before `close`, and leaving by an exception removes what was begun."""

    def __init__(self, path: Path, spec: SampleSpec) -> None:
        self.path, self.spec = path, spec
        finals = (path, drops_path(path), record_path(path))
        self._hidden = {final: final.with_name(f".{final.name}.tmp") for final in finals}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._sink = pa.OSFile(str(self._hidden[path]), "wb")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error}", next="name another --out") from error
        schema = SCHEMA.with_metadata({"eagle3_data.samples": json.dumps(spec.to_dict())})
        self._writer = pa.ipc.new_file(self._sink, schema)
        # names of files need not be text: an escape stands for what is none
        self._drops = self._hidden[drops_path(path)].open("w", encoding="utf-8", errors="backslashreplace")
        self._digest = xxhash.xxh3_128()
        self.samples = self.tokens = self.supervised = self.longest = 0
        self.dropped: Counter[str] = Counter()

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Forget what was written, unless `close` came first."""
        self._drops.close()
        if not self._sink.closed:
            self._writer.close()
            self._sink.close()
        for hidden in self._hidden.values():
            hidden.unlink(missing_ok=True)

    def add(self, chunk: Chunk, kept: Sequence[bool]) -> None:
        """Write the samples of a chunk for which `kept` is true, in order."""
        if chunk.keys:
            batch = _batch(chunk)
            for key, digest, keep in zip(chunk.keys, chunk.digests, kept, strict=True):
                if keep:
                    self._digest.update(key.encode() + digest)
            if not all(kept):
                batch = batch.filter(pa.array(kept))
            self._writer.write_batch(batch)
            tokens = batch.column("tokens").to_numpy()
            self.samples += len(tokens)
            self.tokens += int(tokens.sum())
            self.supervised += int(batch.column("supervised").to_numpy().sum())
            self.longest = max(self.longest, int(tokens.max(initial=0)))
        for drop in chunk.drops:
            self.drop(drop)

    def drop(self, drop: Drop) -> None:
        self.dropped[drop.reason] += 1
        row = {"row": drop.row, "id": drop.id, "reason": drop.reason, "detail": drop.detail}
        self._drops.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self, report: SampleReport) -> None:
        """Make the samples visible: everything is on disk before the first rename."""
        self._writer.close()
        self._sink.close()
        self._drops.close()
        record = {
            "format": FORMAT,
            "rows": self.samples,
            "bytes": self._hidden[self.path].stat().st_size,
            "digest": self._digest.hexdigest(),
            "spec": self.spec.to_dict(),
            "report": report.to_dict(),
        }
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        self._hidden[record_path(self.path)].write_text(text, encoding="utf-8", errors="backslashreplace")
        for hidden in self._hidden.values():
            durable.fsync_file(hidden)
        record_path(self.path).unlink(missing_ok=True)
        for final, hidden in self._hidden.items():
            os.rename(hidden, final)
        durable.fsync_dir(self.path.parent)


def _batch(chunk: Chunk) -> pa.RecordBatch:
    offsets = pa.array(np.concatenate(([0], np.cumsum(chunk.tokens))), pa.int32())
    columns = [
        pa.array(chunk.keys, pa.string()),
        pa.array(chunk.ids, pa.string()),
        pa.array(chunk.tokens, pa.int32()),
        pa.array(chunk.supervised, pa.int32()),
        pa.ListArray.from_arrays(offsets, pa.array(chunk.input_ids)),
        pa.ListArray.from_arrays(offsets, pa.array(chunk.loss_mask)),
        pa.array(chunk.sources, pa.string()),
    ]
    return pa.record_batch(columns, schema=SCHEMA)


class SampleStore:
    """Finished samples, memory-mapped: opening reads counts alone, a row reads its own bytes."""

    def __init__(self, path: Path, reader: pa.RecordBatchFileReader, record: Mapping[str, Any]) -> None:
        self.path, self._reader = path, reader
        self.digest: str = record["digest"]
        """XXH3-128 over all keys, ids and masks in order: equal digests mean equal samples."""
        self.spec = SampleSpec.from_dict(record["spec"])
        self.report = SampleReport.from_dict(record["report"])
        self._starts = [0]
        tokens = []
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            self._starts.append(self._starts[-1] + batch.num_rows)
            tokens.append(batch.column("tokens").to_numpy())
        self.tokens: NDArray[np.int32] = np.concatenate(tokens) if tokens else np.empty(0, np.int32)
        """Tokens of every sample."""

    @classmethod
    def open(cls, path: str | Path) -> SampleStore:
        """Raises InputError when there are no samples, they are unfinished, or not of this form."""
        path = Path(path)
        try:
            record = json.loads(record_path(path).read_text(encoding="utf-8"))
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise InputError(
                f"{path}: no finished samples here ({Path(str(error.filename)).name} is missing)",
                next="make them with: eagle3-data samples INPUT --model MODEL --out " + str(path),
            ) from error
        except ValueError as error:
            raise InputError(f"{record_path(path)}: not JSON ({error})") from error
        if record.get("format") != FORMAT or record.get("bytes") != size:
            raise InputError(
                f"{path}: the record beside it describes {record.get('bytes')} bytes of format {record.get('format')}, "
                f"found {size} bytes, format {FORMAT} is expected",
                next="prepare the samples again",
            )
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
        except pa.ArrowInvalid as error:
            raise InputError(f"{path}: not an Arrow file ({error})", next="prepare the samples again") from error
        return cls(path, reader, record)

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> Sample:
        """Sample `index`; negative counts from the end. Raises IndexError beyond."""
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"sample {index} of {count}")
        index %= count
        batch = bisect_right(self._starts, index) - 1
        return _row(self._reader.get_batch(batch), index - self._starts[batch])

    def __iter__(self) -> Iterator[Sample]:
        for index in range(self._reader.num_record_batches):
            batch = self._reader.get_batch(index)
            for at in range(batch.num_rows):
                yield _row(batch, at)

    def verify(self) -> None:
        """Read everything and compare with the recorded digest. Raises InputError when it differs."""
        digest = xxhash.xxh3_128()
        for sample in self:
            digest.update(sample.key.encode() + sample_digest(sample.input_ids, sample.loss_mask))
        if digest.hexdigest() != self.digest:
            raise InputError(f"{self.path}: digest {digest.hexdigest()}, recorded {self.digest}", next="prepare again")


def _row(batch: pa.RecordBatch, at: int) -> Sample:
    return Sample(
        key=batch.column("key")[at].as_py(),
        id=batch.column("id")[at].as_py(),
        input_ids=batch.column("input_ids")[at].values.to_numpy(),
        loss_mask=batch.column("loss_mask")[at].values.to_numpy(),
        source=batch.column("source")[at].as_py(),
    )
