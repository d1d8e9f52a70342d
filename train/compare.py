"""Several drafts on the same prompts: which is accepted more, and whether the difference is more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle3_data.errors import ConfigError
from eagle3_data.train.evaluate import EvalReport

RESAMPLES = 2000
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Compared:
    """One draft against the first one, over the prompts whose answers repeat themselves with none of the drafts."""

    draft: str
    prompts: int
    acceptance_length: float
    difference: float
    """Of the acceptance length to the first draft's."""
    interval: Interval
    """95 % of the differences when the prompts are drawn again (bootstrap, fixed seed); (0, 0) for the first."""
    tokens_per_s: float
    repeating: int
    """Its own answers that repeat themselves, left out for all."""

    @property
    def distinct(self) -> bool:
        """The interval leaves out zero."""
        return self.interval[0] > 0 or self.interval[1] < 0


def compare(reports: Sequence[EvalReport]) -> list[Compared]:
    """In the order given. Raises ConfigError when the reports are not of the same prompts, or all answers repeat."""
    ids = [[result.id for result in report.per_prompt] for report in reports]
    if any(one != ids[0] for one in ids):
        raise ConfigError("the drafts were measured on different prompts", next="evaluate them in one call")
    used = [
        place
        for place, results in enumerate(zip(*(report.per_prompt for report in reports), strict=True))
        if all(result.verifications and not result.repeats for result in results)
    ]
    if not used:
        raise ConfigError("no prompt is left to compare on: every answer repeats itself or is one token long")
    tokens, checks = (
        np.array([[getattr(report.per_prompt[i], name) for i in used] for report in reports], dtype=np.float64)
        for name in ("tokens", "verifications")
    )  # [drafts, prompts]
    lengths = tokens.sum(1) / checks.sum(1)
    drawn = np.random.default_rng(0).integers(len(used), size=(RESAMPLES, len(used)))
    again = np.stack([t[drawn].sum(1) / c[drawn].sum(1) for t, c in zip(tokens, checks, strict=True)])
    return [
        Compared(
            report.draft,
            len(used),
            float(lengths[k]),
            float(lengths[k] - lengths[0]),
            _middle(again[k] - again[0]),
            report.tokens_per_s,
            report.overall.low_diversity,
        )
        for k, report in enumerate(reports)
    ]


def _middle(values: npt.NDArray[np.float64]) -> Interval:
    low, high = np.quantile(values, [0.025, 0.975]).tolist()
    return low, high
