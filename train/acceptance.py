"""What the answers of a server that decodes with a draft say of the draft.

The server counts, per request, completion tokens and verifications (`spec_verify_ct`). Over some requests:

    acceptance length   sum of completion tokens / sum of verifications, SGLang's `spec_accept_length`; the target's own
                        token is included, so 1.0 is a useless draft; long answers weigh more, as they do in serving
    accepted per step   sum of accepted draft tokens / sum of verifications
    by position         share of verifications that accepted at least 1, 2, ... draft tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3_data.train.eval_prompts import EvalPrompt

LOW_DIVERSITY = 0.5
"""An answer whose share of different 4-grams is below this repeats itself, which any draft predicts well."""
NGRAM = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's result."""

    prompt: EvalPrompt
    output_ids: tuple[int, ...]
    verifications: int
    accepted: int
    histogram: tuple[int, ...]
    """Entry k: verifications that accepted exactly k draft tokens."""

    @property
    def diversity(self) -> float:
        """Different 4-grams / 4-grams; 1.0 for an answer too short to repeat one."""
        grams = [self.output_ids[i : i + NGRAM] for i in range(len(self.output_ids) - NGRAM + 1)]
        return len(set(grams)) / len(grams) if grams else 1.0


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Sums over some answers."""

    answers: int
    tokens: int
    verifications: int
    acceptance_length: float
    accepted_per_step: float
    by_position: list[float]
    low_diversity: int
    """Answers below `LOW_DIVERSITY`."""

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Acceptance:
        # an answer of one token is made by the prefill alone and says nothing about the draft
        used = [answer for answer in answers if answer.verifications]
        tokens = sum(len(answer.output_ids) for answer in used)
        verifications = sum(answer.verifications for answer in used)
        longest = max((len(answer.histogram) for answer in used), default=0)
        counts = [sum(a.histogram[k] for a in used if k < len(a.histogram)) for k in range(longest)]
        total = sum(counts)
        positions = [sum(counts[k:]) / total for k in range(1, longest)] if total else []
        return cls(
            len(answers),
            tokens,
            verifications,
            tokens / verifications if verifications else 1.0,
            sum(answer.accepted for answer in used) / verifications if verifications else 0.0,
            positions,
            sum(answer.diversity < LOW_DIVERSITY for answer in answers),
        )
