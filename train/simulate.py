"""Acceptance length of a draft on recorded answers, as the server would measure it.

The walk. For an answer x_a .. x_b of a greedy target the server's prefill emits x_a. Each verification then starts at
the row whose input is the last emitted token, accepts the draft's first c tokens that are right (at most k), and the
target adds one of its own: c + 1 tokens. The walk repeats this to x_b. Per answer:

    acceptance length = tokens emitted / verifications          (SGLang: completion_tokens / spec_verify_ct)

It includes the target's own ("bonus") token, so 1.0 is a draft that is never right and k + 1 the best. Step i of a row
was computed with the recorded tokens as input, which are the draft's own as long as it was right: the condition.
On answers that were sampled, not greedy, it is the length under greedy verification along the recorded path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_data.train.alignment import answer_spans


@dataclass(frozen=True, slots=True)
class Walk:
    """Sums over answers; addable."""

    emitted: int = 0
    verifications: int = 0
    accepted: int = 0
    """Draft tokens that were right."""

    def __add__(self, other: Walk) -> Walk:
        return Walk(
            self.emitted + other.emitted,
            self.verifications + other.verifications,
            self.accepted + other.accepted,
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification, the server's definition; 1.0 when nothing was verified."""
        return self.emitted / self.verifications if self.verifications else 1.0


def chain_lengths(correct_ST: Tensor, draft_tokens: int) -> list[int]:
    """Right draft tokens in a row from each position, at most `draft_tokens`: [T]. correct: bool [S, T]."""
    chain = correct_ST[:draft_tokens].to(torch.int64).cumprod(dim=0).sum(dim=0)
    lengths: list[int] = chain.tolist()
    return lengths


def walk_answers(correct_ST: Tensor, loss_mask_T: Tensor, draft_tokens: int) -> Walk:
    """The walk over every answer of one document. `correct` must come from 'strict' rows."""
    chain = chain_lengths(correct_ST, draft_tokens)
    total = Walk()
    for first, last in answer_spans(loss_mask_T):
        if first == 0:
            continue  # no row before the answer: the server always has a prompt
        at, verifications, accepted = first, 0, 0  # x_at is the last emitted token
        while at < last:
            right = min(chain[at - 1], last - at)
            at += min(right + 1, last - at)
            verifications, accepted = verifications + 1, accepted + right
        total += Walk(last - first + 1, verifications, accepted)
    return total
