"""Learning rate over a run, by the share of it that is done: of its data, or of a limit on steps or time."""

from __future__ import annotations

import math

from eagle3_data.train.config import OptimConfig


def progress(data_share: float, step: float, elapsed_s: float, config: OptimConfig) -> float:
    """Share of the run done, 0..1: of its data, of `max_steps` or of `max_minutes`, whichever is furthest.

    Of the data and not of the steps that it makes, so that a run goes on where it was when it is resumed with more or
    fewer micro-batches a step.
    """
    share = data_share
    if config.max_steps is not None:
        share = max(share, step / config.max_steps)
    if config.max_minutes is not None:
        share = max(share, elapsed_s / (60 * config.max_minutes))
    return min(share, 1.0)


def rate_factor(done: float, config: OptimConfig) -> float:
    """Factor on the peak rate after share `done` of the run: linear warm-up, then cosine, linear or constant."""
    if done < config.warmup_share:
        return done / config.warmup_share
    if config.schedule == "constant":
        return 1.0
    left = (1.0 - done) / (1.0 - config.warmup_share)
    shape = left if config.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))
    return config.final_lr_share + (1.0 - config.final_lr_share) * shape
