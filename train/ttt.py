"""One training forward pass: the draft unrolled on its own output, and the loss of all its steps.

The whole unroll is one module, so that DDP and FSDP see one forward and one backward per micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from eagle3_data.train.alignment import step_inputs
from eagle3_data.train.attention import TttCache, make_attention
from eagle3_data.train.config import LossConfig, TttConfig
from eagle3_data.train.draft import Eagle3Draft
from eagle3_data.train.losses import LossOutput, draft_loss, step_weights
from eagle3_data.train.teacher import Teacher


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on its device. B rows, T positions; several documents may share a row."""

    input_ids: Tensor
    """int64 [B, T], 0 on padding."""
    aux: Tensor
    """[B, T, L*W] aux states."""
    last: Tensor
    """[B, T, W] post-norm last states, or int32 [B, T, 2K] top-k tokens (`teacher.pack_top`)."""
    document: Tensor
    """int32 [B, T]: number of the document in its row, -1 on padding."""
    positions: Tensor
    """int32 [B, T]: position inside the document, from 0."""
    rows: Tensor
    """bool [S, B, T]: trained rows of each draft step (`alignment.row_masks`)."""


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """The batch flattened to N = B*T rows, and the R of them that are trained at some step."""

    mask_SN: Tensor
    """bool [S, N]"""
    active_R: Tensor
    """int64 [R], ascending; one row of padding when nothing is trained, so that every parameter gets a gradient."""
    place_N: Tensor
    """int64 [N]: index into `active_R`, 0 for rows that are not in it."""
    document_N: Tensor
    """int64 [N]: a number per document of the whole batch, -1 on padding."""

    @classmethod
    def of(cls, batch: Batch) -> TrainedRows:
        height, length = batch.document.shape
        mask = batch.rows.flatten(1, 2)
        active = mask.any(0).nonzero()[:, 0]
        if len(active) == 0:
            active = torch.zeros(1, dtype=torch.int64, device=mask.device)
        place = torch.zeros(height * length, dtype=torch.int64, device=mask.device)
        place[active] = torch.arange(len(active), device=mask.device)
        first = torch.arange(height, device=mask.device)[:, None] * length
        document = torch.where(batch.document >= 0, batch.document + first, -1)
        return cls(mask, active, place, document.flatten())


class TttModel(nn.Module):
    """Draft and frozen teacher; only the draft's parameters are trained."""

    def __init__(
        self,
        draft: Eagle3Draft,
        teacher: Teacher,
        ttt: TttConfig,
        loss: LossConfig,
        attention: Literal["plain", "flex"],
    ) -> None:
        super().__init__()
        self.draft, self.teacher = draft, teacher
        self.ttt, self.loss, self.attention = ttt, loss, attention

    def forward(self, batch: Batch, counts_S: Tensor | None = None) -> LossOutput:
        """`counts_S`: rows of each step in the whole optimizer step, for the 'tokens' denominator."""
        rows = TrainedRows.of(batch)
        hidden_SRH = self.unroll(batch, rows)
        last_NW = batch.last.flatten(0, 1)
        weights = step_weights(rows.mask_SN, last_NW, self.teacher, self.loss, decay=self.ttt.decay, counts_S=counts_S)
        return draft_loss(hidden_SRH, self.draft.lm_head.weight, last_NW, rows, weights, self.teacher, self.loss)

    def unroll(self, batch: Batch, rows: TrainedRows) -> Tensor:
        """Normed draft states of the active rows at every step, [S, R, H]; `draft.lm_head` of them are the logits."""
        step_zero = make_attention(
            self.attention, rows.document_N, rows.active_R, self.draft.spec.sliding_window_tokens
        )
        cache = TttCache()
        positions = batch.positions.flatten()  # [N]
        state = self.draft.project(batch.aux.flatten(0, 1))  # [N, H]
        outs = []
        for step in range(rows.mask_SN.shape[0]):
            tokens = step_inputs(batch.input_ids, batch.document, step).flatten()  # [N]
            if step == 0:
                normed, state = self.draft.step(tokens, state, positions, cache, step_zero, rows.active_R)
            else:
                active = rows.active_R
                normed, state = self.draft.step(tokens[active], state, positions[active] + step, cache, step_zero)
            outs.append(normed)
        return torch.stack(outs)
