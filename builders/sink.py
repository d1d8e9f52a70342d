"""Where captured samples go: open shards, filled by several threads, sealed one by one, each seal in the manifest.

The order is fixed by DESIGN section 4 and invariant 5: bytes, then notes, then (all samples settled) failures durable,
shard durable, index part, rename, manifest row.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from eagle3_data import durable
from eagle3_data.builders.dumps import Dump, Request
from eagle3_data.builders.ledger import Ledger
from eagle3_data.builders.plan import Plan, PlannedShard
from eagle3_data.builders.samples.store import Sample, SampleStore
from eagle3_data.errors import DiskFull, LedgerError
from eagle3_data.failures import Failure
from eagle3_data.hub.digest import file_xxh3
from eagle3_data.manifest import Manifest, ServerRow, ShardRow
from eagle3_data.protocol import ids_digest
from eagle3_data.shards.index import read_part
from eagle3_data.shards.layout import END_BYTES, SampleRecord
from eagle3_data.shards.writer import OpenShard, Place, notes_path

if TYPE_CHECKING:
    from eagle3_data.head import TargetHead

DISK_POLL_S = 2.0
T = TypeVar("T")


class ShardSink:
    """`note` says what is waited for (a full disk); empty while all is well. `tokens`, `nbytes`: placed so far.

    `on_empty` gets the name of a shard that ends without a sample: no mirror will take it, so its room is free again.
    """

    def __init__(
        self,
        folder: Path,
        plans: Sequence[Plan],
        store: SampleStore,
        manifest: Manifest,
        ledger: Ledger,
        head: TargetHead | None = None,
        *,
        on_empty: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.head, self.on_empty = head, on_empty
        self.folder, self.plans, self.store, self.ledger = folder, list(plans), store, ledger
        self.spec = manifest.spec
        self.manifest = manifest
        self._waiting: dict[str, str] = {}
        self.tokens = manifest.tokens
        self.nbytes = manifest.nbytes
        self.seals: list[ShardRow] = list(manifest.shards)
        """Sealed shards in the order of their seals; it only grows."""
        self._sealed = {row.name for row in manifest.shards}
        self.resumed = manifest.saved
        """Samples that were there before this run: sealed, or found whole in an open shard."""
        ledger.save(manifest.saved)
        self._open: dict[str, OpenShard] = {}
        self._sealing = asyncio.Lock()
        self.moving = threading.Lock()
        """Held while a seal closes gaps: then samples of open shards lie elsewhere than `find` said."""

    def is_sealed(self, name: str) -> bool:
        return name in self._sealed

    def reopen(self) -> None:
        """Open what an earlier run left unsealed, so that all counts begin with what is there and never go down."""
        names = {path.name for path in (self.folder / "data").glob(f"*{self.manifest.split}-*")}
        for planned in chain.from_iterable(self.plans):
            here = planned.name in names or notes_path(self.folder, planned.name).name in names
            if here and not self.is_sealed(planned.name):
                self.open_shard(planned)

    def open_shard(self, planned: PlannedShard) -> list[int]:
        """Open (or reopen) a shard; returns the rows of the store that it still needs, in order."""
        if planned.name in self._open:
            return self._missing(planned)
        if self.is_sealed(planned.name):
            return []
        places = []
        for row, offset in zip(planned.rows.tolist(), planned.offsets.tolist(), strict=True):
            sample = self.store.row(row)
            places.append(Place(sample.key, sample.id, sample.tokens, offset))
        self._recover(planned.name)
        if self.is_sealed(planned.name):
            return []
        shard = OpenShard(self.folder, planned.name, places, self.spec, self.head)
        for key in shard.places:
            if key in self.ledger.failures:
                shard.give_up(key)
        self._open[planned.name] = shard
        self.ledger.save(len(shard.records))
        self.resumed += len(shard.records)
        self.tokens += sum(record.tokens for record in shard.records.values())
        self.nbytes += shard.bytes_placed
        return self._missing(planned)

    def _missing(self, planned: PlannedShard) -> list[int]:
        shard = self._open[planned.name]
        pending = set(shard.pending)
        return [row for row, key in zip(planned.rows.tolist(), shard.places, strict=True) if key in pending]

    @property
    def note(self) -> str:
        """What samples wait for, as long as any does."""
        return f"waiting: {next(iter(self._waiting.values()))}" if self._waiting else ""

    async def place(self, name: str, sample: Sample, request: Request, dump: Dump) -> None:
        """Move a proven dump into its shard. Waits while the disk is full. Raises DumpCorrupt."""
        shard = self._open[name]
        record = make_record(sample, request, dump, with_last=self.spec.last != "none")
        mask = sample.loss_mask.tobytes()
        placed = await self.patiently_aside(
            record.key, lambda: shard.write(record, dump.fd, dump.states_at, request.input_ids, mask)
        )
        await self.patiently(record.key, lambda: shard.settle(placed))
        self.ledger.save(1)
        self.tokens += record.tokens
        self.nbytes += shard.block_bytes(record.key)

    async def patiently(self, what: str, work: Callable[[], T]) -> T:
        """`work`, again and again while the disk is full; it must be safe to repeat."""

        async def here() -> T:
            return work()

        return await self._until_space(what, here)

    async def patiently_aside(self, what: str, work: Callable[[], T]) -> T:
        """As `patiently`, in a thread: for what moves states."""
        return await self._until_space(what, lambda: asyncio.to_thread(work))

    async def _until_space(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        try:
            while True:
                try:
                    return await attempt()
                except (DiskFull, OSError) as error:
                    await self.pause(what, error)
        finally:
            self.go_on(what)

    async def pause(self, what: str, error: Exception) -> None:
        """Wait a little for space, `note` says so; anything but a full disk is raised."""
        if not durable.is_full(error):
            raise error
        path = getattr(error, "filename", None) or self.folder
        self._waiting[what] = error.message if isinstance(error, DiskFull) else f"no space for {path}"
        await asyncio.sleep(DISK_POLL_S)

    def go_on(self, what: str) -> None:
        self._waiting.pop(what, None)

    @property
    def instances(self) -> set[str]:
        """Starts of servers that the manifest knows: their dumps are taken, no other's."""
        return {row.instance for row in self.manifest.servers}

    async def add_servers(self, rows: Sequence[ServerRow]) -> None:
        """Servers that came back as new processes: in the manifest before their first dump is in a shard."""
        new = tuple(row for row in rows if row.instance not in self.instances)
        if new:
            async with self._sealing:
                servers = (*self.manifest.servers, *new)
                await self.patiently(
                    "servers", lambda: self._save(self.manifest.model_copy(update={"servers": servers}))
                )

    def find(self, name: str, key: str) -> tuple[Path, int, int] | None:
        """(file, offset, bytes) of a sample that was placed in a shard that is still open; None otherwise."""
        shard = self._open.get(name)
        if shard is None or key not in shard.records:
            return None
        layout = shard.layout_of(key)
        return shard.path, shard.places[key].offset + layout.member, layout.member_bytes

    def give_up(self, name: str, failure: Failure) -> None:
        self.ledger.fail(failure)
        self._open[name].give_up(failure.key)

    async def seal_if_settled(self, name: str) -> None:
        """Seal the shard once all its samples are saved or given up."""
        async with self._sealing:
            shard = self._open.get(name)
            if shard is None or not shard.settled:
                return
            await self.patiently(name, self.ledger.flush)
            row = await self.patiently_aside(name, lambda: self._seal(shard))
            if row is not None:
                await self.patiently(name, lambda: self._record(row))
                self.nbytes += END_BYTES
            shard.forget()
            del self._open[name]
            if row is None:
                self.on_empty(name)

    def _seal(self, shard: OpenShard) -> ShardRow | None:
        with self.moving:
            return shard.seal()

    def tidy(self) -> None:
        """All shards are sealed: drop the notes that a crash just after a seal left behind. Raises LedgerError."""
        if self._open:
            raise LedgerError(f"all samples are settled and {len(self._open)} shards are not sealed: {min(self._open)}")
        for path in (self.folder / "data").glob(f".{self.manifest.split}-*"):
            path.unlink()

    def close(self) -> None:
        """The end of a run, however it ends: what was placed stays, ready for a resume."""
        for shard in self._open.values():
            shard.flush()
            shard.close()
        self._open.clear()

    def _record(self, row: ShardRow) -> None:
        shards = tuple(sorted((*self.manifest.shards, row), key=lambda shard: shard.name))
        self._save(self.manifest.model_copy(update={"shards": shards, "failed": self.ledger.failed}))
        self._sealed.add(row.name)
        self.seals.append(row)

    def _save(self, manifest: Manifest) -> None:
        manifest.save(self.folder)
        self.manifest = manifest

    def _recover(self, name: str) -> None:
        """A crash between rename and manifest row: adopt the file if it is what its index part says, else reopen it."""
        final = self.folder / "data" / name
        if not final.exists():
            return
        row = read_part(self.folder, name)
        if row is not None and final.stat().st_size == row.nbytes and file_xxh3(final) == row.xxh3:
            self._record(row)
            self.ledger.save(row.samples)
            self.resumed += row.samples
            self.tokens += row.tokens
            self.nbytes += row.nbytes
            return
        final.rename(durable.hidden(final))


def make_record(sample: Sample, request: Request, dump: Dump, *, with_last: bool) -> SampleRecord:
    return SampleRecord(
        key=sample.key,
        id=sample.id,
        tokens=sample.tokens,
        supervised=sample.supervised,
        ids_digest=ids_digest(request.input_ids),
        next_token=dump.next_token,
        checksum=dump.checksum if with_last else dump.checksum.split(":")[0],
    )


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
