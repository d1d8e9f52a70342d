"""Which rows of a batch belong to which prompt of ours.

A prompt's rows come in one piece, or in chunks over several batches (chunked prefill). `prefix_lens` and `extend_lens`
are read as they are when `run_batch` returns: overlap scheduling changes them before the result is processed.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3_data.protocol import RequestId

CAPTURED = "eagle3_captured"
"""Attribute on an SGLang request whose prompt is complete: retracted and prefilled again, it needs no second dump."""


_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Prompt:
    """One request of ours, once: prefilled again from its beginning it is another one."""

    rid: str
    ids: array[int]
    request: Any
    """SGLang's."""
    seen: int = 0
    """Rows claimed."""
    over: bool = False
    """Failed, abandoned or written: rows that still come are of no use. Never cleared."""
    begun: bool = False
    """The process that writes is told of it. Never cleared."""
    number: int = field(default_factory=_numbers.__next__)
    """What it is called between the scheduler and the process that writes."""

    @property
    def tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Segment:
    """`rows` rows of one prompt in one batch."""

    prompt: Prompt
    offset: int
    """First row in the batch."""
    start: int
    """First row in the prompt."""
    rows: int
    index: int
    """Place of the request in the batch: row of the logits."""
    final: bool
    """The prompt is complete with these rows."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A prompt whose rows cannot become a dump any more."""

    prompt: Prompt
    reason: str
    detail: str


@dataclass(slots=True)
class Claims:
    """What one batch means for our prompts."""

    segments: list[Segment] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    abandoned: list[Prompt] = field(default_factory=list)
    """Prompts that start again in this batch: what was captured of them before is void."""


class Prompts:
    """The prompts of which rows are still to come. Used by the scheduler thread alone."""

    def __init__(self) -> None:
        self._open: dict[str, Prompt] = {}

    def claim(self, batch: Any) -> Claims:
        """Our rows of a prefill batch, and the prompts that this batch shows to be lost.

        Rows are counted over all requests, ours or not; padding after the last request is never looked at.
        """
        self._open = {rid: prompt for rid, prompt in self._open.items() if not prompt.request.finished()}
        claims = Claims()
        offset = 0
        for index, (request, prefix, extend) in enumerate(
            zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        ):
            if RequestId.parse(request.rid) is not None:
                self._claim(claims, request, int(prefix), int(extend), offset, index)
            offset += int(extend)
        return claims

    def _claim(self, claims: Claims, request: Any, prefix: int, extend: int, offset: int, index: int) -> None:
        prompt = self._open.get(request.rid)
        if _aborted(request):
            # SGLang replaces a rejected prompt by one token and still runs it.
            if prompt is not None:
                del self._open[prompt.rid]
                claims.failures.append(Failure(prompt, "aborted", "the request was aborted"))
            return
        tokens = len(request.origin_input_ids)
        rows = min(extend, tokens - prefix)
        if rows <= 0 or getattr(request, CAPTURED, False):  # tokens it generated itself, or a retracted request again
            return
        if prompt is None or prefix == 0:
            if prompt is not None:  # it starts again after a retraction: never mix its rows with the earlier ones
                claims.abandoned.append(prompt)
            prompt = self._open[request.rid] = Prompt(request.rid, _ids(request.origin_input_ids), request)
        final = prefix + rows == tokens
        if final:
            del self._open[prompt.rid]
        if prompt.over:
            return
        if prompt.seen != prefix:
            detail = f"rows from {prefix} came when {prompt.seen} of {tokens} were there"
            if prompt.seen < prefix:
                detail += "; is a prefix cache on?"
            claims.failures.append(Failure(prompt, "rows", detail))
            return
        prompt.seen += rows
        if final:
            setattr(request, CAPTURED, True)
        claims.segments.append(Segment(prompt, offset, prefix, rows, index, final))


def _ids(input_ids: Sequence[int]) -> array[int]:
    """A copy of the prompt as int32: SGLang rewrites its own when it aborts a request."""
    return array("i", input_ids)


def _aborted(request: Any) -> bool:
    """SGLang has decided that the request ends without being answered, and may have replaced its prompt."""
    return bool(request.to_finish) or bool(request.finished())
