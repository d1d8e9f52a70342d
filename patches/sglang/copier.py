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

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_data.patches.sglang.arena import ALIGN, Arena, Block, SharedBlock, aligned
from eagle3_data.patches.sglang.rows import Segment
from eagle3_data.patches.sglang.states import BatchStates


class CopiedRows:
    """Rows of one prompt in the arena; see `dumps.HostRows`. Bytes alone: writers hold Python's lock no longer."""

    def __init__(
        self, block: SharedBlock, aux: memoryview, last: memoryview, finite: memoryview, token: memoryview
    ) -> None:
        self._block, self._held = block, True
        self.aux, self.last = aux, last
        self._finite, self._token = finite, token

    def wait(self) -> None:
        self._block.wait()

    def finite(self) -> bool:
        return 0 not in bytes(self._finite)

    def next_token(self) -> int:
        return int.from_bytes(self._token, sys.byteorder, signed=True)

    def release(self) -> None:
        if self._held:
            self._held = False
            self.aux = self.last = self._finite = self._token = memoryview(b"")
            self._block.let_go()


SHARED_PARTS = 16
"""No block that prompts share is larger than such a part of the arena."""


@dataclass(frozen=True, slots=True)
class Run:
    """Segments that lie one after the other in the batch, and where they go."""

    segments: Sequence[Segment]
    block: Block | None
    """None: the arena had no room for even one of them."""

    @property
    def span(self) -> slice:
        """Rows of the batch."""
        end = self.segments[-1]
        return slice(self.segments[0].offset, end.offset + end.rows)

    @property
    def requests(self) -> slice:
        return slice(self.segments[0].index, self.segments[-1].index + 1)


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

    def of_run(self, run: Run) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[n, L*W], [n, W], bool [n], int64 [requests] (-1 when there are no logits)"""
        rows, requests = run.span, run.requests
        if self.tokens is None:
            tokens = self.finite.new_full((requests.stop - requests.start,), -1, dtype=torch.int64)
        else:
            tokens = self.tokens[requests]
        return self.aux[rows], self.last[rows], self.finite[rows], tokens


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
        runs = [run for adjacent in _adjacent(segments) for run in self._place(adjacent, row)]
        blocks = [run.block for run in runs if run.block is not None]
        if not blocks:
            return [None] * len(segments)
        done = None
        if self._module is not None:
            done = self._module.Event(blocking=True)  # a waiting writer sleeps, never spins
        try:
            return self._copy(states, segments[-1].offset + segments[-1].rows, runs, producer, done)
        except BaseException:  # the device may be out of memory for the staged rows
            for block in blocks:
                self.arena.give_back(block, done)
            raise

    def _place(self, segments: Sequence[Segment], row: int) -> list[Run]:
        """One block for many, since every copy costs the scheduler thread time; halves where there is none so large.

        And where it is a good part of the arena: a prompt that waits for room in the spool keeps its whole block.
        """
        rows = sum(segment.rows for segment in segments)
        nbytes = rows * (row + 1) + 8 * (segments[-1].index - segments[0].index + 1) + 4 * ALIGN
        if len(segments) == 1 or nbytes <= len(self.arena.memory) // SHARED_PARTS:
            block = self.arena.take(nbytes)
            if block is not None or len(segments) == 1:
                return [Run(segments, block)]
        half = len(segments) // 2
        return self._place(segments[:half], row) + self._place(segments[half:], row)

    def _copy(
        self, states: BatchStates, rows: int, runs: Sequence[Run], producer: Any, done: Any
    ) -> list[CopiedRows | None]:
        if self._module is None:
            return self._start(Staged.of(states, rows, own=False), runs, None)
        read = self._module.Event()
        self._stream.wait_stream(producer)
        with self._module.stream(self._stream):
            try:
                staged = Staged.of(states, rows, own=True)
                read.record(self._stream)
                copied = self._start(staged, runs, done)
            finally:
                done.record(self._stream)
        for tensor in (*_tensors(states.aux), states.last, states.logits):
            if tensor is not None:
                tensor.record_stream(self._stream)
        producer.wait_event(read)  # only now may the next forward rewrite what was read here
        return copied

    def _start(self, staged: Staged, runs: Sequence[Run], event: Any) -> list[CopiedRows | None]:
        copied: list[CopiedRows | None] = []
        for run in runs:
            if run.block is None:
                copied += [None] * len(run.segments)
                continue
            sources = staged.of_run(run)
            parts = self._carve(run.block, sources)
            for target, source in zip(parts, sources, strict=True):
                target.copy_(source, non_blocking=True)
            shared = SharedBlock(self.arena, run.block, len(run.segments), event)
            views = [(_bytes(part), part.nbytes // len(part)) for part in parts]
            copied += [CopiedRows(shared, *_cut(views, run.segments[0], segment)) for segment in run.segments]
        return copied

    def _carve(self, block: Block, like: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors in `block` with the shapes and dtypes of `like`."""
        at, parts = block[0], []
        for tensor in like:
            nbytes = tensor.numel() * tensor.element_size()
            parts.append(self.arena.memory[at : at + nbytes].view(tensor.dtype).view(tensor.shape))
            at += aligned(nbytes)
        return parts


def _adjacent(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments in groups without foreign rows in between."""
    groups: list[list[Segment]] = []
    for segment in segments:
        if groups and groups[-1][-1].offset + groups[-1][-1].rows == segment.offset:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _cut(views: Sequence[tuple[memoryview, int]], head: Segment, segment: Segment) -> list[memoryview]:
    """The bytes of one segment in each host tensor of the run that begins with `head`, given with their bytes a row."""
    spans = [(segment.offset - head.offset, segment.rows)] * 3 + [(segment.index - head.index, 1)]
    return [
        view[start * each : (start + count) * each] for (view, each), (start, count) in zip(views, spans, strict=True)
    ]


def finite_rows(x: Tensor) -> Tensor:
    """bool [N]: no NaN or Inf in the row. x is [N, C]; one reduction without a temporary of x's size."""
    # The largest magnitude of a row; NaN and Inf survive, and float32 holds every bfloat16 and float16.
    return torch.isfinite(torch.linalg.vector_norm(x, ord=float("inf"), dim=-1, dtype=torch.float32))


def _bytes(tensor: Tensor) -> memoryview:
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _tensors(aux: Tensor | list[Tensor]) -> list[Tensor]:
    return [aux] if isinstance(aux, Tensor) else aux


def _width(aux: Tensor | list[Tensor]) -> int:
    """L*W"""
    return sum(tensor.shape[-1] for tensor in _tensors(aux))
