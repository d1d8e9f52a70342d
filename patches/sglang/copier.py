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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_data.patches.sglang.arena import ALIGN, Arena, Block, SharedBlock, aligned
from eagle3_data.patches.sglang.messages import Span, Spans
from eagle3_data.patches.sglang.rows import Segment
from eagle3_data.patches.sglang.states import BatchStates


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Where rows of one prompt lie in the arena, once the batch's copies are done; see `dumps.HostRows`."""

    block: SharedBlock
    """To be let go of once."""
    spans: Spans


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
        self.arena = Arena(nbytes, pinned=device.startswith("cuda"))
        self._stream: Any = self._module.Stream() if self._module is not None else None

    def copy(
        self, states: BatchStates, segments: Sequence[Segment], producer: Any = None
    ) -> tuple[list[CopiedRows | None], Any]:
        """Start the copies of one batch: (rows of each segment, or None when it found no host memory; an event).

        The rows may be read after `synchronize` of the event; None: now. `producer` is the stream on which the batch
        ran and the next one will run (None on a CPU).
        """
        row = (_width(states.aux) + states.last.shape[-1]) * states.last.element_size()
        runs = [run for adjacent in _adjacent(segments) for run in self._place(adjacent, row)]
        blocks = [run.block for run in runs if run.block is not None]
        if not blocks:
            return [None] * len(segments), None
        done = None
        if self._module is not None:
            done = self._module.Event(blocking=True)  # who waits for it sleeps, never spins
        try:
            copied = self._copy(states, segments[-1].offset + segments[-1].rows, runs, producer, done)
        except BaseException:  # the device may be out of memory for the staged rows
            for block in blocks:
                self.arena.give_back(block, done)
            raise
        return copied, done

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
            at, parts = run.block[0], []
            for source in staged.of_run(run):
                self.arena.memory[at : at + source.nbytes].view(source.dtype).view(source.shape).copy_(
                    source, non_blocking=True
                )
                parts.append((at, source.nbytes // len(source)))
                at += aligned(source.nbytes)
            shared = SharedBlock(self.arena, run.block, len(run.segments), event)
            copied += [CopiedRows(shared, _spans(parts, run.segments[0], segment)) for segment in run.segments]
        return copied


def _adjacent(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments in groups without foreign rows in between."""
    groups: list[list[Segment]] = []
    for segment in segments:
        if groups and groups[-1][-1].offset + groups[-1][-1].rows == segment.offset:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _spans(parts: Sequence[tuple[int, int]], head: Segment, segment: Segment) -> Spans:
    """Of one segment, in each part (place in the arena, bytes a row) of the run that begins with `head`."""

    def span(part: tuple[int, int], first: int, count: int) -> Span:
        at, each = part
        return at + first * each, at + (first + count) * each

    aux, last, finite, tokens = parts
    first, count = segment.offset - head.offset, segment.rows
    return Spans(
        span(aux, first, count),
        span(last, first, count),
        span(finite, first, count),
        span(tokens, segment.index - head.index, 1),
    )


def finite_rows(x: Tensor) -> Tensor:
    """bool [N]: no NaN or Inf in the row. x is [N, C]; one reduction without a temporary of x's size."""
    # The largest magnitude of a row; NaN and Inf survive, and float32 holds every bfloat16 and float16.
    return torch.isfinite(torch.linalg.vector_norm(x, ord=float("inf"), dim=-1, dtype=torch.float32))


def _tensors(aux: Tensor | list[Tensor]) -> list[Tensor]:
    return [aux] if isinstance(aux, Tensor) else aux


def _width(aux: Tensor | list[Tensor]) -> int:
    """L*W"""
    return sum(tensor.shape[-1] for tensor in _tensors(aux))
