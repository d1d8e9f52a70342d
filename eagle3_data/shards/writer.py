"""An open shard: a hidden file with a fixed place for every planned sample, filled in any order, sealed once.

Each placed sample is read back from the file and its checksum compared with the server's, then noted in a sidecar
(`.{name}.placed`, one JSON line). A crash loses nothing that was placed: a resume checks each noted sample against its
checksum and keeps what holds. Only at the seal does the file get its final name, and only then a row in the manifest.

The sizes of compressed samples are not known before. Each is put at the start of a slot of the largest size it can be;
the holes behind it take no disk (sparse file), and the seal closes them as it closes the gaps of failed samples. So the
hidden file is the reorder window: bounded by the plan, safe from a kill, and no sample waits for a slower one.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from eagle3_data import durable
from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import BuildFailed, DiskFull, DumpCorrupt, Eagle3Error
from eagle3_data.manifest import ShardRow
from eagle3_data.protocol import DTYPE_BYTES
from eagle3_data.shards.index import IndexRow, write_part
from eagle3_data.shards.layout import (
    END_BYTES,
    BlockLayout,
    SampleRecord,
    block_head,
    block_layout,
    member_header,
    state_ranges,
)
from eagle3_data.shards.moves import copy_range, digest_range, move_left, write_at

if TYPE_CHECKING:
    from eagle3_data.head import TargetHead

PIECE_BYTES, READ_BYTES = 1 << 20, 256 << 10
"""Copied, then read back while the caches still have it; more fell out of them, less is all system calls."""


@dataclass(frozen=True, slots=True)
class Place:
    """One planned sample and where it goes."""

    key: str
    id: str
    tokens: int
    offset: int
    """Of its block in the shard (of its slot, when its size is not known before), bytes."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A sample that lies in its place."""

    record: SampleRecord
    tail: str
    """XXH3-64 of its ids, mask and padding, hex."""
    packed: tuple[int, ...] = ()
    """Bytes of its compressed planes."""

    def to_line(self) -> str:
        data = {"record": self.record.to_dict(), "tail": self.tail, "packed": self.packed}
        return json.dumps(data, separators=(",", ":")) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> Placed:
        """Raises ValueError, TypeError or KeyError for anything else, such as half a line."""
        data = json.loads(line.decode())
        record, packed = SampleRecord(**data["record"]), tuple(data["packed"])
        if not (isinstance(record.key, str) and all(type(number) is int for number in (record.tokens, *packed))):
            raise TypeError("a key is text, sizes are whole numbers")
        return cls(record, data["tail"], packed)


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:06d}.tar"


def notes_path(folder: Path, name: str) -> Path:
    """What was placed in a shard that is not sealed, one line per sample."""
    return folder / "data" / f".{name}.placed"


class OpenShard:
    """Not thread-safe as a whole; `write` may run in several threads for different samples."""

    def __init__(
        self,
        folder: Path,
        name: str,
        places: Sequence[Place],
        spec: CaptureSpec,
        head: TargetHead | None = None,
    ) -> None:
        self.folder, self.name, self.spec, self.head = folder, name, spec, head
        self.places = {place.key: place for place in places}
        self.records: dict[str, SampleRecord] = {}
        self.failed: set[str] = set()
        self._packed: dict[str, tuple[int, ...]] = {}
        self.final = folder / "data" / name
        self.path = durable.hidden(self.final)
        self._notes_path = notes_path(folder, name)
        self.final.parent.mkdir(parents=True, exist_ok=True)
        self._restore()
        self._notes = durable.Lines(self._notes_path)
        self._copying = threading.Lock()
        """The kernel lets one thread at a time write to a file, and the others wait in a spin: they had better hash."""
        self._whole: tuple[ShardRow, list[IndexRow]] | None = None
        """What the seal found, once the gaps are closed."""

    @property
    def pending(self) -> list[str]:
        return [key for key in self.places if key not in self.records and key not in self.failed]

    @property
    def settled(self) -> bool:
        """Nothing is pending; asked after every sample, so it does not look at all of them."""
        return len(self.records) + len(self.failed) == len(self.places)

    @property
    def bytes_placed(self) -> int:
        return sum(self.block_bytes(key) for key in self.records)

    def block_bytes(self, key: str) -> int:
        """Of a placed sample; of one that is not there yet, the most it can take."""
        return self.layout_of(key).total

    def layout_of(self, key: str) -> BlockLayout:
        """Of a placed sample; of one that is not there yet, its slot's."""
        return self._layout(self.places[key], self._packed.get(key))

    def write(self, record: SampleRecord, source: int, states_at: int, ids: Sequence[int], mask: bytes) -> Placed:
        """Put one sample in its place; `source` is the dump's descriptor, `states_at` where its states start.

        Returns what `settle` takes. Raises DumpCorrupt when the bytes that arrived do not
        give `record.checksum`, DiskFull when there is no space.
        """
        place = self.places[record.key]
        target = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        packed: tuple[int, ...] = ()
        try:
            if not self.spec.as_sent:
                record, packed = self._write_encoded(record, source, states_at, target)
            layout = self._layout(place, packed)
            head = block_head(record, layout) + member_header(self.spec, place.tokens, packed)
            tail = array("i", ids).tobytes() + mask
            tail += bytes(layout.total - layout.tail - len(tail))
            write_at(target, tail, place.offset + layout.tail)
            if self.spec.as_sent and self._copy_states(source, states_at, target, place, layout) != record.checksum:
                raise DumpCorrupt(f"sample {record.key}: its states do not give the server's checksum")
            write_at(target, head, place.offset)
        except OSError as error:
            if durable.is_full(error):
                raise DiskFull(f"no space for {self.final}") from error
            raise
        finally:
            os.close(target)
        return Placed(record, xxhash.xxh3_64_hexdigest(tail), packed)

    def settle(self, placed: Placed) -> None:
        """Count a sample that `write` has put in its place. Raises DiskFull, with nothing counted."""
        record = placed.record
        if record.key in self.records or record.key in self.failed:
            raise AssertionError(f"{self.name}: sample {record.key} is settled already")
        self._notes.write(placed.to_line())
        self.records[record.key] = record
        self._packed[record.key] = placed.packed

    def give_up(self, key: str) -> None:
        """Leave a failed sample out; the seal closes its gap."""
        self.failed.add(key)

    def seal(self) -> ShardRow | None:
        """Close the gaps of failed samples, make the file durable, give it its name. None when nothing was saved.

        The caller appends the returned row to the manifest and then calls `forget`. On a full disk it raises DiskFull
        or OSError with nothing lost, and may be called again.
        """
        if self.pending:
            raise AssertionError(f"{self.name}: sealed with {len(self.pending)} samples open")
        if not self.records:
            return None
        row, rows = self._whole = self._whole or self._compact()
        write_part(self.folder, row, rows)
        os.replace(self.path, self.final)
        durable.fsync_dir(self.final.parent)
        return row

    def _compact(self) -> tuple[ShardRow, list[IndexRow]]:
        rows, end = [], 0
        with open(self.path, "r+b") as file:
            self._reserve(file.fileno())
            for place in self.places.values():
                record = self.records.get(place.key)
                if record is None:
                    continue
                layout = self._layout(place, self._packed[place.key])
                if place.offset != end:
                    self._unbroken(move_left, file.fileno(), place.offset, end, layout.total)
                rows.append(
                    IndexRow(
                        key=place.key,
                        id=record.id,
                        shard=self.name,
                        offset=end + layout.member,
                        nbytes=layout.member_bytes,
                        tokens=place.tokens,
                        supervised=record.supervised,
                        next_token=record.next_token,
                        checksum=record.checksum,
                    )
                )
                end += layout.total
            # written, not a hole: on a full tmpfs a hole that is read through a map is a bus error
            self._unbroken(write_at, file.fileno(), bytes(END_BYTES), end)
            file.truncate(end + END_BYTES)
            self._unbroken(os.fsync, file.fileno())
            digest = self._digest(file.fileno(), 0, end + END_BYTES)
        row = ShardRow(
            name=self.name,
            samples=len(rows),
            tokens=sum(index.tokens for index in rows),
            nbytes=end + END_BYTES,
            xxh3=digest,
        )
        return row, rows

    def _unbroken(self, step: Callable[..., None], *arguments: int | bytes) -> None:
        """A step that cannot be begun again where it broke off. Raises BuildFailed: a resume checks every sample."""
        try:
            step(*arguments)
        except OSError as error:
            raise BuildFailed(
                f"{self.final} could not be closed: {error}",
                next="mend the disk, then repeat the command: what does not give its checksum is captured again",
            ) from error

    def _reserve(self, fd: int) -> None:
        """Disk for the holes that samples move into, and the end: a full disk is met before the first byte moves.

        A move that broke off half-way could not be begun again. Raises DiskFull.
        """
        total = self.bytes_placed + END_BYTES
        try:
            os.posix_fallocate(fd, 0, total)
        except OSError as error:
            if durable.is_full(error):
                raise DiskFull(f"no space to seal {self.final}") from error
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system without it
                raise

    def flush(self) -> None:
        """Make what was placed durable without sealing (the end of an interrupted run)."""
        if self.path.exists():
            durable.fsync_file(self.path)
        self._notes.sync()

    def close(self) -> None:
        self._notes.close()

    def forget(self) -> None:
        """After the manifest has the shard: the notes are no longer needed."""
        self.close()
        self._notes_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _layout(self, place: Place, packed: tuple[int, ...] | None = None) -> BlockLayout:
        return block_layout(self.spec, place.tokens, packed)

    def _write_encoded(
        self, record: SampleRecord, source: int, states_at: int, target: int
    ) -> tuple[SampleRecord, tuple[int, ...]]:
        """Encode the dump's states into the place; the record with its `stored` digest, the sizes of its planes."""
        from eagle3_data.shards.codec import encode  # torch loads here, not for readers of the plan

        place = self.places[record.key]
        size = DTYPE_BYTES[self.spec.dtype] * self.spec.width * place.tokens
        aux_end = states_at + size * len(self.spec.layers)
        if os.fstat(source).st_size < aux_end + size:
            raise DumpCorrupt(f"dump ends {aux_end + size - os.fstat(source).st_size} bytes early")
        # private, since torch wants writable memory; closed by the garbage collector, which knows of torch's views
        whole = memoryview(mmap.mmap(source, 0, access=mmap.ACCESS_COPY))
        aux, last = whole[states_at:aux_end], whole[aux_end : aux_end + size]
        sources = (aux, last) if ":" in record.checksum else (aux,)
        if ":".join(xxhash.xxh3_128_hexdigest(part) for part in sources) != record.checksum:
            raise DumpCorrupt(f"sample {record.key}: its states do not give the server's checksum")
        encoded = encode(self.spec, place.tokens, aux, last, self.head)
        layout, digest = self._layout(place, encoded.packed), xxhash.xxh3_128()
        at = start = place.offset + layout.states
        for part in encoded.parts:
            digest.update(part)
            write_at(target, part, at)
            at += memoryview(part).nbytes
        if at - start != layout.state_bytes:
            raise AssertionError(f"sample {record.key}: {at - start} bytes encoded, {layout.state_bytes} planned")
        if self._digest(target, start, layout.state_bytes) != digest.hexdigest():
            raise DumpCorrupt(f"sample {record.key}: its encoded states did not arrive in the shard")
        return replace(record, stored=digest.hexdigest()), encoded.packed

    def _digest(self, fd: int, start: int, count: int) -> str:
        """XXH3-128 of a range of the file, hex."""
        digest = xxhash.xxh3_128()
        digest_range(digest, fd, start, start + count, memoryview(bytearray(READ_BYTES)))
        return digest.hexdigest()

    def _copy_states(self, source: int, states_at: int, target: int, place: Place, layout: BlockLayout) -> str:
        """Move the states into their place and read them back there, piece by piece; the checksum of what arrived."""
        start, digests, back = place.offset + layout.states, [], memoryview(bytearray(READ_BYTES))
        for low, high in state_ranges(self.spec, place.tokens):
            digest = xxhash.xxh3_128()
            for at in range(low, high, PIECE_BYTES):
                end = min(at + PIECE_BYTES, high)
                with self._copying:
                    copy_range(source, states_at + at, target, start + at, end - at)
                digest_range(digest, target, start + at, start + end, back)
            digests.append(digest.hexdigest())
        return ":".join(digests)

    def _checksum(self, fd: int, place: Place, layout: BlockLayout) -> str:
        start, ranges = place.offset + layout.states, state_ranges(self.spec, place.tokens)
        return ":".join(self._digest(fd, start + low, high - low) for low, high in ranges)

    def _restore(self) -> None:
        """Keep what an earlier run placed, sample by sample, where the bytes still are what was noted."""
        if not (self._notes_path.exists() and self.path.exists()):
            return
        kept = []
        with open(self.path, "rb") as file:
            for line in self._notes_path.read_bytes().split(b"\n"):
                try:
                    placed = Placed.from_line(line)
                    holds = self._holds(file.fileno(), placed)
                except (ValueError, TypeError, LookupError, Eagle3Error):
                    continue  # the torn last line of a killed run, or a damaged one: that sample is captured again
                if holds:
                    self.records[placed.record.key] = placed.record
                    self._packed[placed.record.key] = placed.packed
                    kept.append(line)
        durable.write_text(self._notes_path, b"".join(line + b"\n" for line in kept).decode())

    def _holds(self, fd: int, placed: Placed) -> bool:
        record = placed.record
        place = self.places.get(record.key)
        if place is None or place.tokens != record.tokens:
            return False
        layout = self._layout(place, placed.packed)
        if place.offset + layout.total > os.fstat(fd).st_size:
            return False
        head = block_head(record, layout) + member_header(self.spec, place.tokens, placed.packed)
        states = (
            self._checksum(fd, place, layout) == record.checksum
            if self.spec.as_sent
            else self._digest(fd, place.offset + layout.states, layout.state_bytes) == record.stored
        )
        return (
            os.pread(fd, len(head), place.offset) == head
            and xxhash.xxh3_64_hexdigest(os.pread(fd, layout.total - layout.tail, place.offset + layout.tail))
            == placed.tail
            and states
        )
