"""What a build will take, before any GPU second: bytes, shards, hours, disk, upload; and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eagle3_data.builders.plan import Plan, arrow_limit
from eagle3_data.capture import CaptureSpec
from eagle3_data.shards.layout import MAX_MEMBER_BYTES, block_layout, member_bytes_per_token
from eagle3_data.status import format_bytes, format_duration

TOP_K = "topk:64"
INFLIGHT = 64
"""Samples that lie in the spool at once when nothing else is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What there is to put it in; None: not asked."""

    disk_bytes: int
    spool_bytes: int | None = None
    mirror_bytes: int | None = None
    """Quota left on the mirror."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """One way to store the states. Bytes are of whole shards, headers and padding included."""

    spec: CaptureSpec
    samples: int
    tokens: int
    nbytes: int
    """Compressed planes at their usual size; `most_nbytes` if nothing compresses."""
    most_nbytes: int
    shards: int
    longest_bytes: int
    """Of the longest sample."""
    spool_bytes: int
    """For the longest samples that are in flight together, twice over."""
    capture_s: float | None
    upload_s: float | None

    @property
    def option(self) -> str:
        """The options of `build` that store it so."""
        spec = self.spec
        options = [f"--encoding {spec.aux_encoding}"] if spec.aux_encoding != "bf16" else []
        options += [f"--last {spec.last}"] if spec.last != "hidden" else []
        return " ".join(options) or "--encoding bf16"

    @property
    def bytes_per_token(self) -> float:
        return self.nbytes / self.tokens


def estimate(
    tokens: npt.NDArray[np.int32],
    spec: CaptureSpec,
    *,
    shard_bytes: int,
    tokens_per_s: float | None = None,
    upload_bytes_per_s: float | None = None,
    inflight: int = INFLIGHT,
) -> Estimate:
    """`tokens`: int32 [N], tokens per sample."""
    plan = Plan(tokens, spec, shard_bytes)
    longest = np.sort(tokens)[-inflight:].astype(np.int64)
    return Estimate(
        spec=spec,
        samples=len(tokens),
        tokens=plan.total_tokens,
        nbytes=plan.expected_nbytes,
        most_nbytes=plan.nbytes,
        shards=len(plan),
        longest_bytes=block_layout(spec, int(longest[-1])).total,
        spool_bytes=2 * int(longest.sum()) * spec.dump_bytes_per_token,
        capture_s=plan.total_tokens / tokens_per_s if tokens_per_s else None,
        upload_s=plan.expected_nbytes / upload_bytes_per_s if upload_bytes_per_s else None,
    )


def ways(spec: CaptureSpec) -> list[CaptureSpec]:
    """How the same states can be stored, from the most faithful to the smallest."""
    planes = (
        [replace(spec, aux_encoding="bf16-planes", last_encoding="bf16-planes")] if spec.dtype == "bfloat16" else []
    )
    fp8 = replace(spec, aux_encoding="fp8")
    return [
        spec,
        *planes,
        replace(fp8, last_encoding="fp8"),
        replace(spec, last=TOP_K),
        replace(fp8, last=TOP_K),
        replace(spec, last="none"),
        replace(fp8, last="none"),
    ]


def story_lengths(samples: int, tokens: int) -> npt.NDArray[np.int32]:
    """Token counts when only their number and sum are known: as equal as can be."""
    low, extra = divmod(tokens, samples)
    return np.array([low + 1] * extra + [low] * (samples - extra), np.int32)


def objections(chosen: Estimate, others: list[Estimate], room: Room) -> list[str]:
    """Why `chosen` cannot work here, each with the option that would; empty when it can."""
    found = []
    if chosen.longest_bytes > MAX_MEMBER_BYTES:
        limit = int(MAX_MEMBER_BYTES / member_bytes_per_token(chosen.spec))
        found.append(
            f"the longest sample takes {format_bytes(chosen.longest_bytes)}, a tar member holds 8 GiB: "
            f"--max-tokens {limit}"
        )
    for name, limit_bytes, need in (
        ("disk", room.disk_bytes, "nbytes"),
        ("mirror", room.mirror_bytes, "nbytes"),
        ("spool", room.spool_bytes, "spool_bytes"),
    ):
        if limit_bytes is None or getattr(chosen, need) <= limit_bytes:
            continue
        fits = [other for other in others if getattr(other, need) <= limit_bytes]
        way = (
            " or ".join(f"{fit.option} would ({format_bytes(getattr(fit, need))})" for fit in fits[:2])
            if fits
            else _smaller(name)
        )
        found.append(f"{name}: {format_bytes(getattr(chosen, need))} needed, {format_bytes(limit_bytes)} there; {way}")
    return found


def _smaller(name: str) -> str:
    return {
        "disk": "nothing does: a larger disk, fewer samples, or --max-tokens",
        "mirror": "nothing does: a larger quota, fewer samples, or --max-tokens",
        "spool": "fewer requests in flight (--max-inflight) would",
    }[name]


def remarks(chosen: Estimate) -> list[str]:
    """What works and is still worth knowing."""
    limit = arrow_limit(chosen.spec)
    longest = int(chosen.longest_bytes / member_bytes_per_token(chosen.spec))
    if longest > limit:
        return [f"samples over {limit:,} tokens pass 2 GiB: our readers take them, plain datasets does not"]
    return []


def describe(one: Estimate) -> dict[str, str]:
    """Name -> text, ready to print."""
    rows = {
        "samples": f"{one.samples:,}",
        "tokens": f"{one.tokens:,}",
        "states": f"{one.spec.state_bytes_per_token:,} B/token ({one.spec.dtype}, {len(one.spec.layers)} aux"
        f"{' + last' if one.spec.last == 'hidden' else ''}, width {one.spec.width:,})",
        "stored": f"{one.bytes_per_token:,.0f} B/token"
        + ("" if one.nbytes == one.most_nbytes else f" (at most {one.most_nbytes / one.tokens:,.0f})"),
        "shards": f"{format_bytes(one.nbytes)} = {one.nbytes / 1e9:,.0f} GB in {one.shards:,} shards",
        "longest sample": format_bytes(one.longest_bytes),
        "spool": f"{format_bytes(one.spool_bytes)} (the longest {INFLIGHT} samples, twice)",
    }
    if one.capture_s is not None:
        rows["capture"] = f"{format_duration(one.capture_s)} ({one.capture_s / 3600:.1f} h)"
    if one.upload_s is not None:
        rows["upload"] = format_duration(one.upload_s)
    if one.spec.top_k:
        flops = 2.0 * one.tokens * one.spec.width * one.spec.vocab_size
        rows["head"] = (
            f"{flops:.1e} FLOP for the top-k (--head-device)" if flops else "a product per token for the top-k"
        )
    return rows
