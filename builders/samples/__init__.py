"""Conversations to token ids and loss masks: exactly what serving sees, and exactly what the assistant produced."""

from __future__ import annotations

from eagle3_data.builders.samples.prepare import load_tokenizer, prepare_samples
from eagle3_data.builders.samples.spec import SampleSpec
from eagle3_data.builders.samples.store import Sample, SampleReport, SampleStore

__all__ = ["Sample", "SampleReport", "SampleSpec", "SampleStore", "load_tokenizer", "prepare_samples"]
