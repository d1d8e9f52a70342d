"""The training loss over all draft steps, in chunks of positions: memory does not grow with vocabulary x tokens.

For one target position u the teacher's distribution is needed by step i at row u-1-i, for every i. So the loss walks
over target positions: the teacher's logits are made once per position (not once per step), and all steps of a chunk
go through the draft's head in one product. The gradient of the logits is known in closed form, so it is made in the
same pass and nothing of size vocabulary is kept for the backward pass.

Per row, p the target over the draft vocabulary (renormalised), P = p * coverage its own probabilities, q the draft,
a = sum_v min(P_v, q_v) the acceptance rate of one draft token (speculative sampling, arXiv 2211.17192):

    ce         -sum p log q                                 EAGLE, SpecForge, TorchSpec
    kl         sum p (log p - log q)                        speculators
    lk_alpha   -log a                                       LK losses, as in SpecForge
    lk_lambda  w ce + (1 - w)(1 - a), w = lk_scale exp(-lk_decay sg[a])   (SpecForge takes w from the batch mean of a)

Shapes: S steps, N = B*T flattened rows, R trained rows, H hidden width, W target width, D draft vocabulary, C chunk of
positions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from eagle3_data.train.config import LossConfig, LossKind
from eagle3_data.train.fused import fused
from eagle3_data.train.teacher import Teacher

BINS = 10
ACCEPT_FLOOR = 1e-8
CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 256 << 20, 2 << 30
"""Logits of one chunk where the config does not say; a GPU needs large products to be kept busy."""


class Rows(Protocol):
    """The part of `ttt.TrainedRows` that the loss reads."""

    @property
    def mask_SN(self) -> Tensor: ...
    @property
    def place_N(self) -> Tensor: ...


class LossOutput(NamedTuple):
    loss: Tensor
    """Scalar to differentiate: sum over rows of weight * row loss."""
    sums: Tensor
    """float64 [S, 6]: columns of `SUMS` summed over the masked rows."""
    correct: Tensor
    """bool [S, N]: draft top-1 == target top-1 over the whole vocabulary, on masked rows."""
    calibration: Tensor
    """float64 [BINS, 3]: rows, summed confidence max(q), correct rows, by confidence."""


SUMS = ("rows", "loss", "ce", "correct", "accept", "top1_in_draft")


@dataclass(slots=True)
class _Work:
    """Everything of one call that is not differentiated."""

    last_NW: Tensor
    mask_SN: Tensor
    place_N: Tensor
    weight_S: Tensor
    teacher: Teacher
    config: LossConfig
    need_grad: bool
    compute_dtype: torch.dtype


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_SRH: Tensor, head_DH: Tensor, work: _Work) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (steps, rows), device = work.mask_SN.shape, hidden_SRH.device
        head = head_DH.detach().to(work.compute_dtype)
        hidden = hidden_SRH.detach().flatten(0, 1)  # [S*R, H]
        loss = torch.zeros((), dtype=torch.float64, device=device)
        sums = torch.zeros(steps, len(SUMS), dtype=torch.float64, device=device)
        calibration = torch.zeros(BINS, 3, dtype=torch.float64, device=device)
        grad_hidden = torch.zeros_like(hidden) if work.need_grad else None
        grad_head = torch.zeros(head_DH.shape, dtype=torch.float32, device=device) if work.need_grad else None
        chunk_size = chunk_rows(work.teacher, steps, work.config)
        step_S1 = torch.arange(steps, device=device)[:, None]
        targets_U = target_positions(work.mask_SN)
        row_SU = targets_U - 1 - step_S1  # row of step i whose target lies at u: u - 1 - i
        mask_SU = work.mask_SN.gather(1, row_SU.clamp_min(0)) & (row_SU >= 0)
        row_SU = row_SU.clamp_min(0)
        place_SU = work.place_N[row_SU] + step_S1 * hidden_SRH.shape[1]
        correct_SU = torch.empty(steps, len(targets_U), dtype=torch.uint8, device=device)
        # nothing in this loop asks the device for a value: on a GPU the host must stay ahead of the kernels
        for start in range(0, len(targets_U), chunk_size):
            part = slice(start, start + chunk_size)
            place = place_SU[:, part].flatten()  # [S*C]
            hidden_SCH = hidden[place].to(work.compute_dtype).view(steps, -1, hidden.shape[-1])
            teacher = work.teacher.rows(work.last_NW[targets_U[part]])
            chunk_loss, chunk_sums, chunk_calibration, correct_SU[:, part], grad_SCD = _score(
                hidden_SCH @ head.T,  # [S, C, D]
                *teacher,
                work.teacher.kept,
                work.teacher.in_draft,
                mask_SU[:, part].contiguous(),
                work.weight_S,
                work.config.kind,
                work.config.out_of_vocab == "drop",
                work.config.lk_scale,
                work.config.lk_decay,
                work.need_grad,
            )
            loss += chunk_loss
            sums += chunk_sums
            calibration += chunk_calibration
            if grad_hidden is not None and grad_head is not None:
                grad = grad_SCD.flatten(0, 1)  # [S*C, D]
                grad_hidden.index_add_(0, place, (grad @ head).to(grad_hidden.dtype))
                grad_head += (grad.T @ hidden_SCH.flatten(0, 1)).float()
        if grad_hidden is not None and grad_head is not None:
            ctx.save_for_backward(grad_hidden.view(hidden_SRH.shape), grad_head.to(head_DH.dtype))
        # a masked row is the target's only row of its step; the others add zeros
        correct = torch.zeros(steps * rows, dtype=torch.uint8, device=device)
        correct.index_add_(0, (row_SU + step_S1 * rows).flatten(), correct_SU.flatten())
        correct_SN = correct.view(steps, rows).bool()
        ctx.mark_non_differentiable(sums, correct_SN, calibration)
        return loss.float(), sums, correct_SN, calibration

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        # in place: the head's gradient alone is 0.9 GB for Kimi-K2.5, and nothing differentiates twice
        return grad_hidden.mul_(grads[0]), grad_head.mul_(grads[0]), None


@fused
def _score(
    logits_SCD: Tensor,
    top1_C: Tensor,
    p_CD: Tensor,
    coverage_C: Tensor,
    entropy_C: Tensor,
    kept_D: Tensor,
    in_draft_V: Tensor,
    mask_SC: Tensor,
    weight_S: Tensor,
    kind: LossKind,
    drop: bool,
    lk_scale: float,
    lk_decay: float,
    need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, sums [S, 6], calibration [BINS, 3], correct uint8 [S, C], d loss / d logits [S, C, D]) of one chunk.

    Logits [S, C, D] in any float dtype, the gradient in the same; `top1_C` to `entropy_C` are the teacher's rows.
    Everything of size S x C x D is in here, so that on a GPU the compiler makes few passes of it.
    """
    in_draft_C = in_draft_V[top1_C]
    used_SC = mask_SC & in_draft_C if drop else mask_SC
    weight_SC = weight_S[:, None] * used_SC
    log_q = logits_SCD.float().log_softmax(-1)  # [S, C, D]
    q = log_q.exp()
    own = p_CD * coverage_C[:, None]  # [C, D]
    ce = -(p_CD * log_q).sum(-1)
    accept = torch.minimum(own, q).sum(-1)
    confidence, best = q.max(-1)
    ce_share = lk_scale * torch.exp(-lk_decay * accept)
    if kind == "ce":
        row_loss = ce
    elif kind == "kl":
        row_loss = ce - entropy_C
    elif kind == "lk_alpha":
        row_loss = -accept.clamp_min(ACCEPT_FLOOR).log()
    else:
        row_loss = ce_share * ce + (1 - ce_share) * (1 - accept)
    correct = (kept_D[best] == top1_C) & mask_SC
    columns = (mask_SC, row_loss * used_SC, ce * used_SC, correct, accept * mask_SC, in_draft_C & mask_SC)
    sums = torch.stack([column.double().sum(-1) for column in columns], dim=-1)
    bins = (confidence * BINS).long().clamp_max(BINS - 1)
    in_bin = mask_SC.double() * (bins == torch.arange(BINS, device=bins.device)[:, None, None])  # [BINS, S, C]
    calibration = torch.stack([(in_bin * x).sum((-1, -2)) for x in (mask_SC, confidence.double(), correct)], dim=-1)
    loss = (row_loss.double() * weight_SC).sum()
    if not need_grad:
        grad = logits_SCD.new_empty(0)
    elif kind in ("ce", "kl"):
        grad = (q - p_CD) * weight_SC[..., None]
    else:
        # d accept / d logit_v = q_v (1[q_v < P_v] - sum_w q_w 1[q_w < P_w])
        below = (q < own).to(q.dtype)
        rising = q * (below - (q * below).sum(-1, keepdim=True))
        if kind == "lk_alpha":
            grad = rising * (-weight_SC / accept.clamp_min(ACCEPT_FLOOR))[..., None]
        else:
            grad = (q - p_CD) * (weight_SC * ce_share)[..., None] - rising * (weight_SC * (1 - ce_share))[..., None]
    return loss, sums, calibration, correct.to(torch.uint8), grad.to(logits_SCD.dtype)


def target_positions(mask_SN: Tensor) -> Tensor:
    """Ascending target positions u that any step needs: int64 [U]. Step i at row r needs u = r + 1 + i."""
    steps, rows = mask_SN.shape
    needed = torch.zeros(rows + steps + 1, dtype=torch.bool, device=mask_SN.device)
    for i in range(steps):
        needed[1 + i : 1 + i + rows] |= mask_SN[i]
    return needed[:rows].nonzero().flatten()


def chunk_rows(teacher: Teacher, steps: int, config: LossConfig) -> int:
    """Positions per chunk such that its float32 logits, of the teacher and of all steps, fit `chunk_bytes`."""
    per_row = 4 * (2 * teacher.vocab_size + 4 * (steps + 1) * teacher.draft_vocab_size)
    held = config.chunk_bytes or (GPU_CHUNK_BYTES if teacher.kept.is_cuda else CPU_CHUNK_BYTES)
    return max(8, held // per_row)


def step_weights(
    mask_SN: Tensor, last_NW: Tensor, teacher: Teacher, config: LossConfig, *, decay: float, counts_S: Tensor | None
) -> Tensor:
    """Weight of each row of a step, float32 [S]: decay**i / denominator_i.

    `counts_S` are the masked rows of the whole optimizer step over all ranks; None: of this call alone.
    """
    steps, rows = mask_SN.shape
    decays = decay ** torch.arange(steps, dtype=torch.float32, device=mask_SN.device)
    if config.denominator == "batch":
        return decays / rows
    if config.denominator == "tokens":
        counts = mask_SN.sum(-1) if counts_S is None else counts_S.to(mask_SN.device)
    else:
        counts = _rows_used(mask_SN, last_NW, teacher, config).sum(-1)
    return torch.where(counts > 0, decays / counts.clamp_min(1), 0.0)


def _rows_used(mask_SN: Tensor, last_NW: Tensor, teacher: Teacher, config: LossConfig) -> Tensor:
    """mask_SN without the rows that `out_of_vocab: drop` leaves out; costs a second pass of the teacher's head."""
    if config.out_of_vocab == "keep":
        return mask_SN
    targets = target_positions(mask_SN)
    usable = torch.zeros(mask_SN.shape[1], dtype=torch.bool, device=mask_SN.device)
    usable[targets] = teacher.top1_in_draft(last_NW[targets], chunk_rows(teacher, 1, config))
    shifted = torch.zeros_like(mask_SN)
    for i in range(mask_SN.shape[0]):
        shifted[i, : max(0, len(usable) - 1 - i)] = usable[1 + i :]
    return mask_SN & shifted


def draft_loss(
    hidden_SRH: Tensor,
    head_DH: Tensor,
    last_NW: Tensor,
    rows: Rows,
    weight_S: Tensor,
    teacher: Teacher,
    config: LossConfig,
) -> LossOutput:
    """Loss of all steps. hidden: normed draft states; head: the draft's lm_head; last: the target's last states."""
    device = hidden_SRH.device.type
    work = _Work(
        last_NW=last_NW,
        mask_SN=rows.mask_SN,
        place_N=rows.place_N,
        weight_S=weight_S,
        teacher=teacher,
        config=config,
        need_grad=torch.is_grad_enabled() and (hidden_SRH.requires_grad or head_DH.requires_grad),
        compute_dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_SRH.dtype,
    )
    with torch.autocast(device, enabled=False):
        return LossOutput(*_ChunkedLoss.apply(hidden_SRH, head_DH, work))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Means over the masked rows of one draft step, all ranks and micro-batches together."""

    rows: int
    loss: float
    ce: float
    accuracy: float
    """Draft top-1 == target top-1 over the whole vocabulary; a target token outside the draft's counts as wrong."""
    accept: float
    """Mean of sum_v min(P_v, q_v): chance that a sampled draft token is accepted."""
    in_draft: float
    """Share of rows whose target top-1 is in the draft vocabulary: the ceiling of `accuracy`."""

    @classmethod
    def from_sums(cls, sums_S6: Tensor) -> list[StepMetrics]:
        steps = []
        for row in sums_S6.tolist():
            count = max(row[0], 1.0)
            steps.append(cls(int(row[0]), *(value / count for value in row[1:])))
        return steps

    def to_dict(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def total_loss(metrics: list[StepMetrics], decay: float) -> float:
    """Global token mean of the training loss: sum over steps of decay**i * mean loss of step i."""
    return sum(decay**i * step.loss for i, step in enumerate(metrics))


def calibration_error(calibration: Tensor) -> float:
    """Expected calibration error: mean |accuracy - confidence| over the confidence bins, weighted by rows."""
    rows = calibration[:, 0].clamp_min(1)
    gap = (calibration[:, 2] / rows - calibration[:, 1] / rows).abs()
    return float((gap * calibration[:, 0]).sum() / calibration[:, 0].sum().clamp_min(1))
