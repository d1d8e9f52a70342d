"""What a named data set is: the target, its states, its conversations. One frozen object per data set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle3_data.capture import CaptureSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """`capture` is what a build of this data set must have; a server that gives anything else is refused."""

    name: str
    summary: str
    capture: CaptureSpec
    num_layers: int
    context_length: int
    prompts: Path | None = None
    """Prompts shipped with the package; None: the caller brings conversations (`inputs=`)."""
    split: str = "train"
    shard_bytes: int = 1 << 30
    version: str = "1.0.0"
