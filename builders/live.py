"""Training on a build that is not finished: what a reader needs and the shards lack is captured now, and added.

`LiveSamples` has the interface of `ShardSet` over *all* planned samples. The build itself goes on in a thread of this
process, with all its checks, its ledger and its resume; only the order is the reader's instead of the plan's.
A sample that was given up reads as zeros with an empty loss mask, so it takes part in a batch and trains nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import chain
from types import TracebackType

import torch
from torch import Tensor

from eagle3_data.builders.build import build
from eagle3_data.builders.extract import Extractor
from eagle3_data.builders.order import Job
from eagle3_data.builders.samples.store import SampleStore
from eagle3_data.builders.settings import BuildConfig, BuildReport
from eagle3_data.builders.sink import ShardSink
from eagle3_data.capture import Alignment, CaptureSpec
from eagle3_data.errors import BuildFailed
from eagle3_data.manifest import Manifest
from eagle3_data.protocol import IDS, MASK
from eagle3_data.shards.index import read_index
from eagle3_data.shards.reader import ShardSet, columns_at, map_shard
from eagle3_data.shards.table import COLUMNS

POLL_S = 0.02
START_S = 600.0


class ReadersOrder:
    """What is asked for now, then what is expected, then the rest. `want` and `expect` are called by other threads."""

    def __init__(self) -> None:
        self.extractor: Extractor | None = None
        self.shard_of: dict[int, str] = {}
        """Shard of every planned row."""
        self.ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._wanted: deque[int] = deque()
        self._expected: deque[int] | None = None

    def want(self, row: int) -> None:
        self._wanted.append(row)
        self._wake()

    def expect(self, rows: Sequence[int]) -> None:
        self._expected = deque(rows)
        self._wake()

    def stop(self) -> None:
        if self._loop is not None and self.extractor is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.extractor.stop)
            self._wake()

    def _wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    async def jobs(self, extractor: Extractor) -> AsyncIterator[Job]:
        self.extractor, self._loop = extractor, asyncio.get_running_loop()
        pending: dict[int, str] = {}
        for planned in chain.from_iterable(extractor.sink.plans):
            rows = extractor.sink.open_shard(planned)
            self.shard_of.update(dict.fromkeys(planned.rows.tolist(), planned.name))
            if not rows:
                await extractor.sink.seal_if_settled(planned.name)
            pending.update(dict.fromkeys(rows, planned.name))
        self.ready.set()
        while pending and not extractor.stopped:
            row = self._next(pending)
            if row is None:
                self._changed.clear()
                await self._changed.wait()
            else:
                yield Job(row, pending.pop(row))

    def _next(self, pending: dict[int, str]) -> int | None:
        for queue in (self._wanted, self._expected or ()):
            while queue:
                row = queue.popleft()
                if row in pending:
                    return row
        return None if self._expected is None else next(iter(pending))


class LiveSamples:
    """Samples of one build by row of its store. Use as a context manager: leaving it stops the capture in order."""

    def __init__(self, config: BuildConfig, *, on_text: Callable[[str], None]) -> None:
        """Starts the build's thread and returns when its plan is known. Raises the build's own errors."""
        self._order = ReadersOrder()
        self._error: BaseException | None = None
        self.report: BuildReport | None = None
        self._config, self._on_text = config, on_text
        self._thread = threading.Thread(target=self._run, name="eagle3-live", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._order.ready.wait(POLL_S):
            self._raise_error()
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise BuildFailed(f"the build in {config.out} did not start within {START_S:.0f} s")
        assert self._order.extractor is not None
        self._sink: ShardSink = self._order.extractor.sink
        self._store = self._sink.store
        self.tokens = self._store.tokens
        self.keys = [sample.key for sample in self._store]
        manifest = self._sink.manifest
        self.fingerprint = plan_fingerprint(manifest)
        self.capture: CaptureSpec = manifest.spec
        self.alignment: Alignment = manifest.alignment
        self._sealed: dict[str, tuple[ShardSet, int]] = {}
        self._sealed_shards = 0
        self._refreshing = threading.Lock()

    def __enter__(self) -> LiveSamples:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        if error is None:
            self._raise_error()

    def __len__(self) -> int:
        return len(self._store)

    def expect(self, samples: Sequence[int]) -> None:
        """Capture these first, in this order."""
        self._order.expect(samples)

    def close(self) -> None:
        """Let what is in flight end, keep all that was placed."""
        self._order.stop()
        self._thread.join()

    def read(self, i: int, columns: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Tensors of sample `i`; waits for its capture unless only ids and mask are asked for."""
        while True:
            found = self.read_within(i, columns, START_S)
            if found is not None:
                return found

    def read_into(self, i: int, out: Mapping[str, Tensor]) -> None:
        """As `ShardSet.read_into`."""
        copy_rows(self.read(i, tuple(out)), out)

    def read_within(self, i: int, columns: Sequence[str] | None, seconds: float) -> dict[str, Tensor] | None:
        """As `read`, but None when the sample has not come in that time. Raises BuildFailed when it will not come."""
        names = tuple(columns or (name for name in COLUMNS if name in self._names))
        if set(names) <= {IDS, MASK}:
            return stored_sample(self._store, i, names, failed=self.keys[i] in self._sink.ledger.failures)
        deadline = time.monotonic() + seconds
        found = self._find(i, names)
        if found is None:
            self._order.want(i)
        while found is None:
            if not self._thread.is_alive():
                self._raise_error()
                found = self._find(i, names)
                if found is None:
                    raise BuildFailed(f"sample {self.keys[i]} is not in the shards, and the capture has ended")
            elif time.monotonic() > deadline:
                return None
            else:
                time.sleep(POLL_S)
                found = self._find(i, names)
        return found

    def sealed(self, i: int) -> bool:
        """Whether sample `i` lies in a shard that will not change any more."""
        return self.keys[i] in self._sealed

    def failed_keys(self) -> list[str]:
        """Samples that were given up so far."""
        return list(self._sink.ledger.failures)

    @property
    def _names(self) -> set[str]:
        return {name for name, _, _ in self.capture.tensors(1)}

    def _find(self, i: int, names: Sequence[str]) -> dict[str, Tensor] | None:
        """In a sealed shard, in an open one, or given up; None while it is still to come."""
        key = self.keys[i]
        self._refresh()
        if key in self._sealed:
            shards, number = self._sealed[key]
            return shards.read(number, names)
        if key in self._sink.ledger.failures:
            return empty_sample(self.capture, int(self.tokens[i]), names)
        with self._sink.moving:
            place = self._sink.find(self._order.shard_of[i], key)
            if place is None or not place[0].exists():
                return None
            path, offset, nbytes = place
            stat = path.stat()
            buffer = map_shard(str(path), stat.st_size, stat.st_mtime_ns)
            # copies: a later seal may move what lies in an open shard
            found = columns_at(buffer, offset, nbytes, names, self.capture)
            return {name: tensor.clone() for name, tensor in found.items()}

    def _refresh(self) -> None:
        """Read the index of the shards that were sealed since, and of no other."""
        with self._refreshing:
            new = self._sink.seals[self._sealed_shards :]
            if not new:
                return
            folder, manifest = self._config.out, self._sink.manifest.model_copy(update={"shards": tuple(new)})
            shards = ShardSet(folder, manifest, read_index(folder, manifest))
            self._sealed.update((key, (shards, number)) for number, key in enumerate(shards.keys))
            self._sealed_shards += len(new)

    def _run(self) -> None:
        try:
            self.report = build(self._config, on_tick=lambda tick: None, on_text=self._on_text, order=self._order)
        except BaseException as error:  # raised in the reader's thread
            self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def plan_fingerprint(manifest: Manifest) -> str:
    """Of what is planned: the same while shards are added."""
    text = json.dumps(manifest.fingerprint, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def stored_sample(store: SampleStore, i: int, names: Sequence[str], *, failed: bool) -> dict[str, Tensor]:
    """Ids and mask as they were sent; a sample that was given up trains nothing."""
    sample = store.row(i)
    mask = torch.from_numpy(sample.loss_mask.copy())
    tensors = {IDS: torch.from_numpy(sample.input_ids.copy()), MASK: mask.zero_() if failed else mask}
    return {name: tensors[name] for name in names}


def empty_sample(capture: CaptureSpec, tokens: int, names: Sequence[str]) -> dict[str, Tensor]:
    """Zeros in the shapes of a sample: takes part in a batch and trains nothing."""
    shapes = {name: (getattr(torch, dtype), shape) for name, dtype, shape in capture.tensors(tokens)}
    return {name: torch.zeros(shapes[name][1], dtype=shapes[name][0]) for name in names}


def copy_rows(found: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
    """The first rows of each tensor, as many as there is room for."""
    for name, target in out.items():
        target.copy_(found[name][: len(target)])
