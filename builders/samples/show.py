"""A sample as text in which one sees what is learnt: runs of learnt and of context tokens, decoded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle3_data.builders.samples.encode import Encoder
from eagle3_data.builders.samples.store import Sample, SampleReport


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens that are all learnt or all context."""

    text: str
    tokens: int
    learnt: bool


def runs(sample: Sample, encoder: Encoder) -> list[Run]:
    """The sample from its first token to its last, special tokens included."""
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8))) + 1
    parts = np.split(np.arange(sample.tokens), edges)
    return [
        Run(encoder.decode(sample.input_ids[part].tolist()), len(part), bool(sample.loss_mask[part[0]]))
        for part in parts
        if len(part)
    ]


def headline(sample: Sample) -> str:
    """Key, id and counts in one line."""
    share = sample.supervised / sample.tokens
    return f"{sample.key}  id {sample.id}  {sample.tokens:,} tokens, {sample.supervised:,} learnt ({share:.0%})"


def report_lines(report: SampleReport) -> list[str]:
    """The report as lines of text, for terminals and logs."""
    lines = [
        f"input     {', '.join(report.inputs)}: {report.form}, {report.rows:,} rows",
        f"samples   {report.samples:,} with {report.tokens:,} tokens, {report.supervised:,} learnt "
        f"({report.supervised_share:.1%}), longest {report.longest:,}",
    ]
    lines += [f"dropped   {count:,} {reason}" for reason, count in report.dropped.items()]
    lines += [f"note      {count:,} {what}" for what, count in report.notes.items()]
    return lines
