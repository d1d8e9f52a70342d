"""Micro-batches from the shards, read ahead by a thread into buffers that are used again and again.

Samples are read from their file, or their connection, straight into the batch buffer (pinned when it goes to a GPU): no
copy lies between (`read_into`; encoded columns are decoded first). Each rank reads its own micro-batches: nothing is
gathered and cut up on rank 0. Memory is bounded by `BufferPool.nbytes`, known before the first read.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagle3_data.capture import TOP_IDS, TOP_LOGPROBS, Alignment, CaptureSpec
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from eagle3_data.train.alignment import row_masks
from eagle3_data.train.plan import Cursor, MicroBatch, Step
from eagle3_data.train.teacher import pack_top
from eagle3_data.train.ttt import Batch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def teacher_form(capture: CaptureSpec) -> tuple[int, torch.dtype]:
    """Width and dtype of what the teacher is fed per position: the last state, or `teacher.pack_top` of the top-k."""
    return (2 * capture.top_k, torch.int32) if capture.top_k else (capture.width, DTYPES[capture.dtype])


class Samples(Protocol):
    """What training needs of a data set; `eagle3_data.shards.ShardSet` is one."""

    tokens: npt.NDArray[np.int32]

    @property
    def keys(self) -> list[str]: ...
    @property
    def capture(self) -> CaptureSpec: ...
    @property
    def alignment(self) -> Alignment: ...
    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def expect(self, samples: Sequence[int]) -> None: ...
    def read(self, i: int, columns: Sequence[str] | None = None) -> dict[str, Tensor]: ...
    def read_into(self, i: int, out: Mapping[str, Tensor]) -> None: ...


def position_bytes(capture: CaptureSpec) -> int:
    """States of one position in a buffer: aux, and what the teacher is fed."""
    last_width, last_dtype = teacher_form(capture)
    return capture.width * len(capture.layers) * DTYPES[capture.dtype].itemsize + last_width * last_dtype.itemsize


@dataclass(slots=True)
class Buffer:
    """Host memory of one micro-batch, flat; `used` guards its reuse while a copy to the device runs."""

    aux: Tensor
    last: Tensor
    used: torch.cuda.Event | None = None


class BufferPool:
    """`count` buffers for at most `positions` positions each."""

    def __init__(self, capture: CaptureSpec, *, positions: int, count: int, pinned: bool) -> None:
        dtype, width = DTYPES[capture.dtype], capture.width
        last_width, last_dtype = teacher_form(capture)
        self.pinned = pinned
        self.nbytes = count * positions * position_bytes(capture)
        self.aux_width = width * len(capture.layers)
        self._free: queue.Queue[Buffer | None] = queue.Queue()
        for _ in range(count):
            aux = torch.empty(positions * self.aux_width, dtype=dtype, pin_memory=pinned)
            self._free.put(Buffer(aux, torch.empty(positions * last_width, dtype=last_dtype, pin_memory=pinned)))

    def take(self) -> Buffer | None:
        """Waits for a free buffer; None after `close`."""
        buffer = self._free.get()
        if buffer is not None and buffer.used is not None:
            buffer.used.synchronize()
            buffer.used = None
        return buffer

    def give(self, buffer: Buffer) -> None:
        self._free.put(buffer)

    def close(self) -> None:
        self._free.put(None)


@dataclass(slots=True)
class HostBatch:
    """A collated micro-batch on the host; its states are views of `buffer`."""

    batch: Batch
    buffer: Buffer
    tokens: int
    """Real positions, without padding."""
    loss_mask: Tensor
    """uint8 [B, T]."""
    micro: MicroBatch


@dataclass(slots=True)
class LoadedStep:
    """One rank's optimizer step: how many rows its micro-batches train, known before the first of them is used."""

    step: Step
    counts_S: Tensor
    """int64 [S]: trained rows of each draft step, this rank."""


class Collator:
    """Copies samples of a micro-batch into a buffer and works out masks and positions."""

    def __init__(
        self, data: Samples, *, max_sample_tokens: int, steps: int, alignment: Alignment, reader_threads: int
    ) -> None:
        self.data, self.max_sample_tokens, self.steps, self.alignment = data, max_sample_tokens, steps, alignment
        self._readers = ThreadPoolExecutor(reader_threads, thread_name_prefix="eagle3-read")

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)

    def count_rows(self, micro: MicroBatch) -> Tensor:
        """Trained rows of each draft step, int64 [S]; touches only the pages of the loss masks."""
        document, _, places = self._lay_out(micro)
        mask = torch.zeros_like(document, dtype=torch.uint8)
        for sample, row, start, end in places:
            mask[row, start:end] = self.data.read(sample, (MASK,))[MASK][: end - start]
        return self._rows(mask, document).flatten(1).sum(-1)

    def _lay_out(self, micro: MicroBatch) -> tuple[Tensor, Tensor, list[tuple[int, int, int, int]]]:
        """Documents [B, T], positions [B, T], and each sample's (sample, row, start, end)."""
        document = np.full((len(micro.rows), micro.length), -1, dtype=np.int32)
        positions = np.zeros_like(document)
        counting = np.arange(micro.length, dtype=np.int32)
        places = []
        for row, samples in enumerate(micro.rows):
            start = 0
            for number, sample in enumerate(samples):
                end = start + min(int(self.data.tokens[sample]), self.max_sample_tokens)
                document[row, start:end] = number
                positions[row, start:end] = counting[: end - start]
                places.append((sample, row, start, end))
                start = end
        return torch.from_numpy(document), torch.from_numpy(positions), places

    def collate(self, micro: MicroBatch, buffer: Buffer) -> HostBatch:
        height, length = len(micro.rows), micro.length
        capture = self.data.capture
        aux = buffer.aux[: height * length * capture.width * len(capture.layers)].view(height, length, -1)
        last = buffer.last[: height * length * teacher_form(capture)[0]].view(height, length, -1)
        ids = torch.zeros(height, length, dtype=torch.int32)
        mask = torch.zeros(height, length, dtype=torch.uint8)
        document, positions, places = self._lay_out(micro)
        filled = (document >= 0).sum(-1).tolist()
        for row, start in enumerate(filled):
            # what an earlier batch left here must not reach the loss as NaN times zero
            aux[row, start:] = 0
            last[row, start:] = 0

        def copy(place: tuple[int, int, int, int]) -> None:
            sample, row, start, end = place
            out = {AUX: aux[row, start:end], IDS: ids[row, start:end], MASK: mask[row, start:end]}
            if capture.top_k:
                top = self.data.read(sample, (TOP_IDS, TOP_LOGPROBS))
                last[row, start:end] = pack_top(top[TOP_IDS], top[TOP_LOGPROBS])[: end - start]
            else:
                out[LAST] = last[row, start:end]
            self.data.read_into(sample, out)

        for _ in self._readers.map(copy, places):
            pass
        batch = Batch(ids.long(), aux, last, document, positions, self._rows(mask, document))
        return HostBatch(batch, buffer, sum(filled), mask, micro)

    def _rows(self, mask: Tensor, document: Tensor) -> Tensor:
        return row_masks(mask, document, steps=self.steps, alignment=self.alignment)


def empty_batch(capture: CaptureSpec, *, steps: int, length: int) -> Batch:
    """One row of padding: a rank without a micro-batch goes through the same collectives with it."""
    dtype = DTYPES[capture.dtype]
    shape, (last_width, last_dtype) = (1, length), teacher_form(capture)
    return Batch(
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(*shape, capture.width * len(capture.layers), dtype=dtype),
        torch.zeros(*shape, last_width, dtype=last_dtype),
        torch.full(shape, -1, dtype=torch.int32),
        torch.zeros(shape, dtype=torch.int32),
        torch.zeros(steps, *shape, dtype=torch.bool),
    )


def to_device(
    host: HostBatch | None, empty: Batch, device: torch.device, dtype: torch.dtype, pool: BufferPool
) -> Batch:
    """The micro-batch (or the empty one) on the device in the compute dtype; gives the host buffer back."""
    source = empty if host is None else host.batch
    moved = Batch(
        source.input_ids.to(device, non_blocking=True),
        source.aux.to(device, non_blocking=True),
        source.last.to(device, non_blocking=True),
        source.document.to(device, non_blocking=True),
        source.positions.to(device, non_blocking=True),
        source.rows.to(device, non_blocking=True),
    )
    last = moved.last.to(dtype) if moved.last.is_floating_point() else moved.last
    ready = Batch(moved.input_ids, moved.aux.to(dtype), last, moved.document, moved.positions, moved.rows)
    if host is not None:
        if device.type == "cuda":
            host.buffer.used = torch.cuda.Event()  # type: ignore[no-untyped-call]
            host.buffer.used.record()
        else:  # what was not converted is still the buffer's, which the next batch is read into
            aux, last = (
                tensor.clone() if tensor.data_ptr() == memory.data_ptr() else tensor
                for tensor, memory in ((ready.aux, host.buffer.aux), (ready.last, host.buffer.last))
            )
            ready = Batch(ready.input_ids, aux, last, ready.document, ready.positions, ready.rows)
        pool.give(host.buffer)
    return ready


class Prefetcher:
    """Iterates over `LoadedStep` and then its `HostBatch`es (None for an empty share), read ahead in one thread.

    What the thread cannot read is not raised here but kept in `error`, with an empty step or batch in its place: the
    other ranks are about to enter a collective, and this one has to tell them there (`engine.raise_together`).
    """

    def __init__(self, steps: Iterable[Step], collator: Collator, pool: BufferPool, *, depth: int) -> None:
        self._steps, self._collator, self._pool = steps, collator, pool
        self._queue: queue.Queue[LoadedStep | HostBatch | Exception | None] = queue.Queue(maxsize=depth + 1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eagle3-prefetch", daemon=True)
        self.error: Exception | None = None

    def __enter__(self) -> Prefetcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.close()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
        self._thread.join()
        self._collator.close()

    def __iter__(self) -> Iterator[tuple[LoadedStep, Iterator[HostBatch | None]]]:
        while (item := self._get()) is not None:
            if isinstance(item, Exception):
                nothing = torch.zeros(self._collator.steps, dtype=torch.int64)
                yield LoadedStep(Step((), Cursor(), 0), nothing), iter(())
                return
            assert isinstance(item, LoadedStep)
            yield item, self._batches(item)

    def _batches(self, loaded: LoadedStep) -> Iterator[HostBatch | None]:
        for micro in loaded.step.batches:
            if micro is None or self.error is not None:
                yield None
                continue
            host = self._get()
            yield host if isinstance(host, HostBatch) else None

    def _get(self) -> LoadedStep | HostBatch | Exception | None:
        item = self._queue.get() if self.error is None else self.error
        if isinstance(item, Exception):
            self.error = item
        return item

    def _put(self, item: LoadedStep | HostBatch | Exception | None) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def _run(self) -> None:
        try:
            for step in self._steps:
                real = [micro for micro in step.batches if micro is not None]
                counts = torch.zeros(self._collator.steps, dtype=torch.int64)
                for micro in real:
                    counts += self._collator.count_rows(micro)
                self._put(LoadedStep(step, counts))
                for micro in real:
                    buffer = self._pool.take()
                    if buffer is None or self._stop.is_set():
                        return
                    self._put(self._collator.collate(micro, buffer))
            self._put(None)
        except Exception as error:
            self._put(error)
