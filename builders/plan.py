"""Which sample goes where, how large it all gets, and whether it fits: known before the first request.

The plan is a pure function of the token counts, the capture spec and the shard size, so every resume and every machine
arrives at the same one.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import BuildFailed, ConfigError
from eagle3_data.manifest import Manifest, PlanRow
from eagle3_data.shards.layout import (
    END_BYTES,
    HEADER_BYTES,
    MAX_ARROW_BYTES,
    MAX_MEMBER_BYTES,
    block_sizes,
    member_bytes_per_token,
)
from eagle3_data.shards.stored import state_columns
from eagle3_data.shards.writer import shard_name
from eagle3_data.status import format_bytes

MIN_SHARD_BYTES = 1 << 12
USUAL_EXPONENT_SHARE = 0.42
"""Compressed size of the plane of high bytes: 0.41 of it on SmolLM2 (docs/format.md: 0.704 of bf16), rounded up."""


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """Samples `rows` of the store, in file order; `offsets[i]` is where the block of `rows[i]` starts, in bytes."""

    name: str
    rows: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    nbytes: int


class Plan:
    """`rows` of a sample store dealt into shards of at most `shard_bytes`, in order."""

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        spec: CaptureSpec,
        shard_bytes: int,
        *,
        split: str = "train",
        rows: npt.NDArray[np.int64] | None = None,
        first_number: int = 0,
        stride: int = 1,
    ) -> None:
        if shard_bytes < MIN_SHARD_BYTES:
            raise ConfigError(f"shard size of {shard_bytes} bytes is below {MIN_SHARD_BYTES}")
        self.spec, self.split, self.shard_bytes = spec, split, shard_bytes
        self.first_number, self.stride = first_number, stride
        self.rows = np.arange(len(tokens), dtype=np.int64) if rows is None else rows
        self.tokens = tokens[self.rows]
        self._sizes = block_sizes(spec, self.tokens)
        self._ends = np.cumsum(self._sizes)  # [N] end of each sample if all lay in one file
        self._starts = self._cut()

    def _cut(self) -> npt.NDArray[np.int64]:
        """Index of each shard's first sample; a sample larger than a shard gets one of its own."""
        starts, first, n = [], 0, len(self.rows)
        while first < n:
            starts.append(first)
            before = int(self._ends[first - 1]) if first else 0
            after = int(np.searchsorted(self._ends, before + self.shard_bytes - END_BYTES, side="right"))
            first = max(after, first + 1)
        return np.array(starts, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def total_tokens(self) -> int:
        return int(self.tokens.sum(dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return int(self._sizes.sum()) + len(self) * END_BYTES

    @property
    def expected_nbytes(self) -> int:
        """As `nbytes`, with compressed planes at their usual size instead of the most they can take."""
        return self.nbytes - self.total_tokens * int(usual_saving(self.spec))

    def shard(self, i: int) -> PlannedShard:
        low = int(self._starts[i])
        high = int(self._starts[i + 1]) if i + 1 < len(self) else len(self.rows)
        ends = self._ends[low:high] - (self._ends[low - 1] if low else 0)
        offsets = ends - self._sizes[low:high]
        nbytes = int(ends[-1]) + END_BYTES
        return PlannedShard(
            shard_name(self.split, self.first_number + i * self.stride), self.rows[low:high], offsets, nbytes
        )

    def __iter__(self) -> Iterator[PlannedShard]:
        return (self.shard(i) for i in range(len(self)))

    def row(self, skipped: dict[str, int]) -> PlanRow:
        """What a manifest says of the plan; `skipped`: samples dropped before it, by reason."""
        return PlanRow(
            samples=len(self.rows),
            tokens=self.total_tokens,
            nbytes=self.expected_nbytes,
            shards=len(self),
            shard_bytes=self.shard_bytes,
            skipped=skipped,
        )

    def part(self, index: int, count: int) -> Plan:
        """Shards index, index + count, ... of this plan, with their own names and bytes: one machine's work."""
        return PlanPart(self, index, count)


class PlanPart(Plan):
    """Every `count`-th shard of `whole`."""

    def __init__(self, whole: Plan, index: int, count: int) -> None:
        self.spec, self.split, self.shard_bytes = whole.spec, whole.split, whole.shard_bytes
        self.first_number, self.stride = whole.first_number + index, count
        self._shards = [whole.shard(i) for i in range(index, len(whole), count)]
        empty = np.empty(0, np.int64)
        self.rows = np.concatenate([empty, *(shard.rows for shard in self._shards)])
        self.tokens = whole.tokens[np.searchsorted(whole.rows, self.rows)]

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self._shards)

    def shard(self, i: int) -> PlannedShard:
        return self._shards[i]


def check_plan(
    plan: Plan,
    out: Path,
    *,
    written: int,
    context_length: int,
    key_of: Callable[[int], str],
    scratch_bytes: int | None = None,
) -> None:
    """Refuse what cannot work, before any request is sent.

    `written`: bytes of the plan that need no more space (`written_bytes`); `key_of` names the sample of a row;
    `scratch_bytes`: what may lie here at once when shards are removed after their mirror confirmed them. Raises
    ConfigError for samples that the server or the format cannot take, BuildFailed when the disk is too small.
    """
    longest = int(plan.tokens.max(initial=0))
    if longest > context_length:
        over = np.flatnonzero(plan.tokens > context_length)
        worst = int(plan.rows[plan.tokens.argmax()])
        raise ConfigError(
            f"{len(over)} of {len(plan.rows)} samples are longer than the server's {context_length} tokens; "
            f"the longest is {key_of(worst)} with {longest}",
            next=f"--max-tokens {context_length} leaves them out, with --truncation cut it shortens them",
        )
    per_token = member_bytes_per_token(plan.spec)
    member = int(longest * per_token)
    if member > MAX_MEMBER_BYTES:
        limit = int(MAX_MEMBER_BYTES / per_token)
        raise ConfigError(
            f"a sample of {longest} tokens takes {format_bytes(member)}, a tar member holds 8 GiB",
            next=f"--max-tokens {limit}",
        )
    free, need = shutil.disk_usage(out).free, plan.expected_nbytes - written
    if scratch_bytes is not None:
        largest = max((shard.nbytes for shard in plan), default=0)
        if largest > scratch_bytes:
            raise ConfigError(
                f"a shard takes {format_bytes(largest)}, --scratch is {format_bytes(scratch_bytes)}",
                next="a larger --scratch, or a smaller --shard-size",
            )
        need = min(need, scratch_bytes - allocated(out / "data", "*"))  # what lies here is part of the scratch
    if need > free:
        raise BuildFailed(
            f"the shards need {format_bytes(need)} more and {out} has {format_bytes(free)} free",
            next="another --out, fewer samples, or smaller states (--encoding, --last; eagle3-data plan compares them)",
        )


def written_bytes(folder: Path, manifest: Manifest) -> int:
    """Bytes of a build that need no more space: its sealed shards, and what its open ones have taken already."""
    return manifest.nbytes + allocated(folder / "data", f".{manifest.split}-*.tar.tmp")


def allocated(folder: Path, pattern: str) -> int:
    """Disk taken by the files of `folder`, bytes; holes take none. A file may go meanwhile: a push removes shards."""
    total = 0
    for path in folder.glob(pattern) if folder.exists() else ():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def usual_saving(spec: CaptureSpec) -> float:
    """Bytes per token that compressed planes usually take less than their room."""
    values = sum(column.groups * spec.width for column in state_columns(spec) if column.encoding == "bf16-planes")
    return values * (1 - USUAL_EXPONENT_SHARE)


def arrow_limit(spec: CaptureSpec) -> int:
    """Tokens above which a sample cannot go through Arrow (Kimi-K2.5 with the last state: 37,445)."""
    return int((MAX_ARROW_BYTES - HEADER_BYTES) / member_bytes_per_token(spec))
