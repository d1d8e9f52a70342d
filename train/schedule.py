"""Learning rate over a run, by the share of it that is done: of the steps, or of the clock with a time limit."""

from __future__ import annotations

import math

from eagle3_data.train.config import OptimConfig


def progress(step: float, total_steps: int, elapsed_s: float, config: OptimConfig) -> float:
    """Share of the run done, 0..1: of the steps or of `max_minutes`, whichever is further."""
    share = step / max(total_steps, 1)
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
