"""Device -> host, beside the forward pass. Nothing here blocks the scheduler thread.

The states are views of memory that the next forward may rewrite. So: our stream waits for the streams that made them,
copies our rows to device memory of its own, and those streams wait for that alone (fractions of a millisecond); the way
to pinned host memory, some hundred times slower, lies beside the next forward. The staged rows of the next batch reuse
the memory of the last, so the device holds one batch's states. Host memory is one arena of fixed size, taken at start
(pinning is slow); when it is out, the prompt fails and the scheduler goes on. On a CPU the same code runs with ordinary
memory, no streams and nothing staged.

N rows of the batch, n rows of one prompt, L aux layers, W width, R requests, V vocabulary.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_data.patches.sglang.rows import Segment
from eagle3_data.patches.sglang.states import BatchStates

ALIGN = 512
"""Blocks and tensors in the arena start at multiples of this many bytes."""

Block = tuple[int, int]
"""(start, end) in the arena, in bytes."""


class Arena:
    """Host memory of a fixed size, handed out in blocks, first fit. Thread-safe; no call waits for a copy."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.memory = torch.empty(nbytes // ALIGN * ALIGN, dtype=torch.uint8, pin_memory=pinned)
        self._free: list[Block] = [(0, len(self.memory))]
        """Gaps, ascending, never touching each other."""
        self._limbo: list[tuple[Block, Any]] = []
        """Blocks given back while the copy into them was still on its way."""
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes`, or None when no gap is large enough."""
        nbytes = _aligned(nbytes)
        with self._lock:
            self._end_limbo()
            for i, (start, end) in enumerate(self._free):
                if end - start >= nbytes:
                    self._free[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                    return start, start + nbytes
        return None

    def give_back(self, block: Block, event: Any) -> None:
        """Free a block, now or once `event` (None: at once) has come to pass."""
        with self._lock:
            if event is None or event.query():
                self._insert(block)
            else:
                self._limbo.append((block, event))

    def free_bytes(self) -> int:
        with self._lock:
            self._end_limbo()
            return sum(end - start for start, end in self._free)

    def _end_limbo(self) -> None:
        ended = [block for block, event in self._limbo if event.query()]
        if ended:
            self._limbo = [(block, event) for block, event in self._limbo if block not in ended]
            for block in ended:
                self._insert(block)

    def _insert(self, block: Block) -> None:
        start, end = block
        i = bisect.bisect(self._free, block)
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, end))


class CopiedRows:
    """Rows of one prompt in the arena; see `dumps.HostRows`."""

    def __init__(self, arena: Arena, block: Block, parts: Sequence[Tensor], event: Any) -> None:
        self._arena, self._block, self._event = arena, block, event
        self.aux, self.last = _bytes(parts[0]), _bytes(parts[1])
        self._finite, self._next = parts[2], parts[3]
        self._held = True

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def finite(self) -> bool:
        return bool(self._finite.all())

    def next_token(self) -> int:
        return int(self._next)

    def release(self) -> None:
        if self._held:
            self._held = False
            self.aux = self.last = memoryview(b"")
            self._arena.give_back(self._block, self._event)


@dataclass(frozen=True, slots=True)
class Staged:
    """What goes to the host of one batch, on the device."""

    aux: Tensor
    """[n, L*W]"""
    last: Tensor
    """[n, W]"""
    finite: Tensor
    """bool [n]"""
    tokens: Tensor | None
    """int64 [R]: top-1 after each request's last row"""

    @classmethod
    def of(cls, states: BatchStates, rows: int, *, own: bool) -> Staged:
        """The first `rows` rows; `own`: nothing in memory that belongs to the batch."""
        aux = [tensor[:rows] for tensor in _tensors(states.aux)]
        packed = torch.cat(aux, -1) if len(aux) > 1 else aux[0].clone() if own else aux[0]
        last = states.last[:rows].clone() if own else states.last[:rows]
        tokens = None if states.logits is None else states.logits.argmax(-1)
        return cls(packed, last, finite_rows(packed) & finite_rows(last), tokens)

    def top(self, index: int) -> Tensor:
        """int64 []: -1 when there are no logits."""
        return self.finite.new_full((), -1, dtype=torch.int64) if self.tokens is None else self.tokens[index]


class Copier:
    """Copies the rows of a batch that are ours. Used by the scheduler thread alone."""

    def __init__(self, device: str, nbytes: int) -> None:
        """`nbytes` of host memory are taken now. Raises RuntimeError when so much cannot be pinned."""
        self._module = None if device == "cpu" else torch.get_device_module(device)
        self.arena = Arena(nbytes, pinned=self._module is not None)
        self._stream: Any = self._module.Stream() if self._module is not None else None

    def copy(self, states: BatchStates, segments: Sequence[Segment], producer: Any = None) -> list[CopiedRows | None]:
        """Start the copies of one batch; None for a segment that found no host memory.

        `producer` is the stream on which the batch ran and the next one will run (None on a CPU).
        """
        row = (_width(states.aux) + states.last.shape[-1]) * states.last.element_size()
        blocks = [self.arena.take(segment.rows * (row + 1) + 8 + 4 * ALIGN) for segment in segments]
        if not any(blocks):
            return [None] * len(segments)
        rows = max(segment.offset + segment.rows for segment in segments)
        if self._module is None:
            return self._start(Staged.of(states, rows, own=False), segments, blocks, None)
        read, done = self._module.Event(), self._module.Event(blocking=True)  # a waiting writer sleeps, never spins
        self._stream.wait_stream(producer)
        with self._module.stream(self._stream):
            staged = Staged.of(states, rows, own=True)
            read.record(self._stream)
            copied = self._start(staged, segments, blocks, done)
            done.record(self._stream)
        for tensor in (*_tensors(states.aux), states.last, states.logits):
            if tensor is not None:
                tensor.record_stream(self._stream)
        producer.wait_event(read)  # only now may the next forward rewrite what was read here
        return copied

    def _start(
        self, staged: Staged, segments: Sequence[Segment], blocks: Sequence[Block | None], event: Any
    ) -> list[CopiedRows | None]:
        copied: list[CopiedRows | None] = []
        for segment, block in zip(segments, blocks, strict=True):
            if block is None:
                copied.append(None)
                continue
            mine = slice(segment.offset, segment.offset + segment.rows)
            sources = staged.aux[mine], staged.last[mine], staged.finite[mine], staged.top(segment.index)
            parts = self._carve(block, sources)
            for target, source in zip(parts, sources, strict=True):
                target.copy_(source, non_blocking=True)
            copied.append(CopiedRows(self.arena, block, parts, event))
        return copied

    def _carve(self, block: Block, like: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors in `block` with the shapes and dtypes of `like`."""
        at, parts = block[0], []
        for tensor in like:
            nbytes = tensor.numel() * tensor.element_size()
            parts.append(self.arena.memory[at : at + nbytes].view(tensor.dtype).view(tensor.shape))
            at += _aligned(nbytes)
        return parts


def finite_rows(x: Tensor) -> Tensor:
    """bool [N]: no NaN or Inf in the row. x is [N, C]; one reduction without a temporary of x's size."""
    # The largest magnitude of a row; NaN and Inf survive, and float32 holds every bfloat16 and float16.
    return torch.isfinite(torch.linalg.vector_norm(x, ord=float("inf"), dim=-1, dtype=torch.float32))


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGN


def _bytes(tensor: Tensor) -> memoryview:
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _tensors(aux: Tensor | list[Tensor]) -> list[Tensor]:
    return [aux] if isinstance(aux, Tensor) else aux


def _width(aux: Tensor | list[Tensor]) -> int:
    """L*W"""
    return sum(tensor.shape[-1] for tensor in _tensors(aux))
