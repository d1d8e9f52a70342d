"""Answers written by the target itself, with the ids that it was served and that it produced."""

from __future__ import annotations

from eagle3_data.builders.synth.greedy import GreedyShare, greedy_share
from eagle3_data.builders.synth.run import SynthReport, synthesise
from eagle3_data.builders.synth.spec import SynthSpec

__all__ = ["GreedyShare", "SynthReport", "SynthSpec", "greedy_share", "synthesise"]
