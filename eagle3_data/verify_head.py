"""Invariant 3: the stored last state times the target's head gives the token that the server found most probable.

The server leaves that token for the last position of each prompt (`next_token`). Near-ties may fall the other way, as
server and head round differently: at least `share` of the samples must agree, and where not the recorded token's
logit must lie within `gap` of the largest one (relative to it). For top-k data the recorded token is looked up in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from eagle3_data.capture import TOP_IDS, TOP_LOGPROBS, CaptureSpec
from eagle3_data.errors import ConfigError
from eagle3_data.head import TargetHead
from eagle3_data.protocol import LAST
from eagle3_data.shards.table import SampleTable

BATCH = 64


@dataclass(frozen=True, slots=True)
class TopOneRule:
    share: float
    gap: float

    @classmethod
    def of(cls, spec: CaptureSpec) -> TopOneRule:
        """bf16 logits have 8 bits, so two roundings are 2**-7; fp8 states have 4 bits and lose more ties."""
        if spec.last_encoding == "fp8":
            return cls(0.9, 2.0**-3)
        return cls(0.995, 1e-4 if spec.dtype == "float32" else 2.0**-6)


@dataclass(slots=True)
class HeadReport:
    rule: TopOneRule
    samples: int = 0
    agree: int = 0
    worst_gap: float = 0.0
    """Largest gap of a sample that disagrees, relative to its largest logit."""
    worst_key: str = ""

    @property
    def ok(self) -> bool:
        return self.agree >= self.rule.share * self.samples and self.worst_gap <= self.rule.gap

    def __str__(self) -> str:
        text = f"top-1 of stored state x head: {self.agree:,} of {self.samples:,} agree"
        if self.worst_key:
            text += f", largest gap of the others {self.worst_gap:.2g} of the logit ({self.worst_key})"
        return f"{text}; asked: {self.rule.share:.1%}, gap {self.rule.gap:.2g}"


def check_head(
    data: SampleTable, model: str, *, device: str = "cpu", on_sample: Callable[[int], None] = lambda n: None
) -> HeadReport:
    """Raises ConfigError for data without a last state or a head of another width."""
    spec = data.capture
    if spec.last == "none":
        raise ConfigError(f"{data.where} holds no last state, so no head can be checked against it")
    report = HeadReport(TopOneRule.of(spec))
    recorded = torch.tensor(data.index.column("next_token").to_pylist())
    head = None if spec.top_k else TargetHead.load(model, width=spec.width, device=device)
    for low in range(0, len(data), BATCH):
        rows = range(low, min(low + BATCH, len(data)))
        if head is None:
            tops = [data.read(row, (TOP_IDS, TOP_LOGPROBS)) for row in rows]
            ids = torch.stack([top[TOP_IDS][-1] for top in tops]).long()
            scores = torch.stack([top[TOP_LOGPROBS][-1] for top in tops]).float()
            found = torch.where(ids == recorded[low : rows.stop, None], scores, -torch.inf).amax(-1)
            best, top1 = scores[:, 0], ids[:, 0]
        else:
            logits = head.logits(torch.stack([data.read(row, (LAST,))[LAST][-1] for row in rows])).cpu()
            best, top1 = logits.max(-1)
            found = logits.gather(1, recorded[low : rows.stop, None])[:, 0]
        _count(report, data, rows, top1 == recorded[low : rows.stop], (best - found) / best.abs().clamp_min(1e-6))
        on_sample(len(rows))
    return report


def _count(report: HeadReport, data: SampleTable, rows: range, same: torch.Tensor, gaps: torch.Tensor) -> None:
    for row, agrees, gap in zip(rows, same.tolist(), gaps.tolist(), strict=True):
        report.samples += 1
        report.agree += agrees
        if not agrees and gap >= report.worst_gap:
            report.worst_gap, report.worst_key = gap, data.keys[row]
