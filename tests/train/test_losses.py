"""Our loss against plain references of each project's definition, and its gradients against autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3_data.capture import Alignment
from eagle3_data.train.alignment import row_masks
from eagle3_data.train.config import Denominator, LossConfig, LossKind
from eagle3_data.train.losses import BINS, StepMetrics, calibration_error, draft_loss, step_weights, total_loss
from eagle3_data.train.teacher import Teacher
from tests.train.test_ttt import target_info

B, T, S, H, V, D = 2, 23, 7, 16, 96, 40


class Case:
    """Two sequences with two answers each, random draft states and teacher."""

    def __init__(self, draft_vocab: int = D) -> None:
        generator = torch.Generator().manual_seed(3)
        self.hidden = torch.randn(S, B, T, H, generator=generator)
        self.head = torch.randn(draft_vocab, H, generator=generator) * 0.7
        self.last = torch.randn(B, T, 48, generator=generator)
        self.kept = torch.randperm(V, generator=generator)[:draft_vocab].sort().values
        self.teacher = Teacher(torch.randn(V, 48, generator=generator) * 0.3, target_info(), self.kept)
        self.mask = torch.zeros(B, T, dtype=torch.uint8)
        self.mask[0, 4:11] = 1
        self.mask[0, 15:22] = 1  # SpecForge zeroes the mask of a sequence's last token; EAGLE's data ends in a newline
        self.mask[1, 9:20] = 1

    def rows(self, alignment: Alignment, steps: int) -> Tensor:
        document = torch.zeros(B, T, dtype=torch.int32)
        return row_masks(self.mask, document, steps=steps, alignment=alignment)

    def ours(
        self, config: LossConfig, alignment: Alignment, decay: float, steps: int = S
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, gradient of the states [S, B, T, H], gradient of the head)"""
        mask = self.rows(alignment, steps).flatten(1)
        hidden = self.hidden[:steps].flatten(1, 2).clone().requires_grad_()
        head = self.head.clone().requires_grad_()
        last = self.last.flatten(0, 1)
        weights = step_weights(mask, last, self.teacher, config, decay=decay, counts_S=None)
        out = draft_loss(hidden, head, last, _All(mask), weights, self.teacher, config)
        out.loss.backward()
        assert hidden.grad is not None
        assert head.grad is not None
        return out.loss.detach(), hidden.grad.view(steps, B, T, H), head.grad


class _All:
    """Every row is active."""

    def __init__(self, mask_SN: Tensor) -> None:
        self.mask_SN, self.place_N = mask_SN, torch.arange(mask_SN.shape[1])


def left(x: Tensor, by: int, fill: float = 0.0) -> Tensor:
    """x shifted left along its second dimension, filled at the end."""
    if by == 0:
        return x
    return torch.cat([x[:, by:], torch.full_like(x[:, :by], fill)], dim=1)


def eagle_style(case: Case, denominator: str) -> tuple[Tensor, Tensor, Tensor]:
    """EAGLE and SpecForge (mean over batch x length), TorchSpec (over positions that are used).

    Target y_{t+1} at row t, everything shifted left once more per step, masks of step 0 unshifted, positions whose
    target top-1 is outside the draft vocabulary left out, step weights 0.8^i.
    """
    hidden, head = case.hidden.clone().requires_grad_(), case.head.clone().requires_grad_()
    target = left(case.last @ case.teacher.head.T, 1)  # [B, T, V]
    mask = case.mask.float()
    total = torch.zeros(())
    for step in range(S):
        in_draft = case.teacher.in_draft[target.argmax(-1)].float()
        used = mask * in_draft
        p = target[..., case.kept].softmax(-1)
        log_q = (hidden[step] @ head.T).log_softmax(-1)
        rows = -(p * log_q).sum(-1) * used
        total = total + 0.8**step * (rows.mean() if denominator == "batch" else rows.sum() / used.sum())
        target, mask = left(target, 1), left(mask, 1)
    total.backward()
    assert hidden.grad is not None
    assert head.grad is not None
    return total.detach(), hidden.grad, head.grad


RowLoss = Callable[[Tensor, Tensor], Tensor]


def kl(logits: Tensor, targets: Tensor) -> Tensor:
    p = targets.softmax(-1)
    return (p * (p.log() - logits.log_softmax(-1))).sum(-1)


def speculators_style(case: Case, steps: int, decay: float, row_loss: RowLoss = kl) -> tuple[Tensor, Tensor, Tensor]:
    """x_1.. with states g_0.., targets y_1.., mask l_1..; per step the tail is cut off; mean over the mask."""
    hidden, head = case.hidden.clone().requires_grad_(), case.head.clone().requires_grad_()
    targets = (case.last @ case.teacher.head.T)[..., case.kept][:, 1:]
    mask = case.mask[:, 1:].float()
    total = torch.zeros(())
    for step in range(steps):
        logits = (hidden[step, :, :-1] @ head.T)[:, : T - 1 - step]
        m = mask[:, step:]
        total = total + decay**step * (row_loss(logits, targets[:, step:]) * m).sum() / m.sum()
    total.backward()
    assert hidden.grad is not None
    assert head.grad is not None
    return total.detach(), hidden.grad[:steps], head.grad


def assert_same(ours: tuple[Tensor, ...], reference: tuple[Tensor, ...]) -> None:
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("project", "denominator"), [("EAGLE, SpecForge", "batch"), ("TorchSpec", "valid")])
def test_equals_eagle_specforge_torchspec(project: str, denominator: Denominator) -> None:
    config = LossConfig(kind="ce", denominator=denominator, out_of_vocab="drop", chunk_bytes=1 << 16)
    case = Case()
    assert_same(case.ours(config, "legacy", 0.8), eagle_style(case, denominator))


@pytest.mark.parametrize("decay", [1.0, 0.8])
def test_equals_speculators(decay: float) -> None:
    config = LossConfig(kind="kl", denominator="tokens", out_of_vocab="keep", chunk_bytes=1 << 16)
    case = Case()
    assert_same(case.ours(config, "input", decay, steps=3), speculators_style(case, 3, decay))


@pytest.mark.parametrize("kind", ["ce", "kl", "lk_alpha", "lk_lambda"])
def test_gradients_equal_autograd_of_the_formula(kind: LossKind) -> None:
    case = Case()
    config = LossConfig(kind=kind, out_of_vocab="keep", lk_scale=0.9, lk_decay=2.0, chunk_bytes=1 << 16)
    ours = case.ours(config, "strict", 0.8)
    hidden, head = case.hidden.clone().requires_grad_(), case.head.clone().requires_grad_()
    logits = case.last @ case.teacher.head.T
    total = torch.zeros(())
    for step, mask in enumerate(case.rows("strict", S)):
        target = left(logits, step + 1)
        full = target.softmax(-1)[..., case.kept]
        p = target[..., case.kept].softmax(-1)
        log_q = (hidden[step] @ head.T).log_softmax(-1)
        ce = -(p * log_q).sum(-1)
        accept = torch.minimum(full, log_q.exp()).sum(-1)
        share = 0.9 * torch.exp(-2.0 * accept.detach())
        rows = {
            "ce": ce,
            "kl": (p * (p.log() - log_q)).sum(-1),
            "lk_alpha": -accept.log(),
            "lk_lambda": share * ce + (1 - share) * (1 - accept),
        }[kind]
        total = total + 0.8**step * (rows * mask).sum() / mask.sum()
    total.backward()
    assert_same(ours, (total.detach(), hidden.grad, head.grad))


def test_chunk_size_does_not_change_anything() -> None:
    case = Case()
    whole, parts = (case.ours(LossConfig(chunk_bytes=size), "strict", 0.8) for size in (1 << 30, 1 << 16))
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b)


def test_metrics_count_out_of_vocabulary_tokens_as_wrong() -> None:
    """A draft that is as right as its vocabulary allows has the accuracy of the vocabulary's coverage, no more."""
    case = Case()
    mask = case.rows("strict", 1).flatten(1)
    last = case.last.flatten(0, 1)
    logits = last @ case.teacher.head.T  # [N, V]
    # states that are the teacher's own draft-vocabulary logits of the next position, with the identity as head
    hidden = torch.zeros(1, B * T, D)
    hidden[0, :-1] = logits[1:, case.kept]
    config = LossConfig()
    weights = step_weights(mask, last, case.teacher, config, decay=0.8, counts_S=None)
    out = draft_loss(hidden, torch.eye(D), last, _All(mask), weights, case.teacher, config)
    metrics = StepMetrics.from_sums(out.sums)[0]
    rows = mask[0].nonzero().flatten()
    inside = case.teacher.in_draft[logits[rows + 1].argmax(-1)].float().mean()
    full = logits[rows + 1].softmax(-1)[:, case.kept].sum(-1)
    assert metrics.rows == len(rows)
    assert metrics.accuracy == pytest.approx(float(inside))
    assert metrics.in_draft == pytest.approx(float(inside))
    # sum_v min(P_v, P_v / coverage) is the coverage
    assert metrics.accept == pytest.approx(float(full.mean()), abs=1e-5)
    assert float(out.calibration[:, 0].sum()) == len(rows)


def test_total_loss_is_the_weighted_sum_of_step_means() -> None:
    case = Case()
    config = LossConfig(out_of_vocab="keep")
    mask, last = case.rows("strict", S).flatten(1), case.last.flatten(0, 1)
    weights = step_weights(mask, last, case.teacher, config, decay=0.8, counts_S=None)
    out = draft_loss(case.hidden.flatten(1, 2), case.head, last, _All(mask), weights, case.teacher, config)
    assert total_loss(StepMetrics.from_sums(out.sums), 0.8) == pytest.approx(float(out.loss), rel=1e-5)


def test_calibration_error_by_hand() -> None:
    """10 rows at confidence 0.95 of which 8 are right, 30 rows at 0.55 of which 18 are: |0.8 - 0.95|, |0.6 - 0.55|."""
    bins = torch.zeros(BINS, 3, dtype=torch.float64)
    bins[9] = torch.tensor([10, 9.5, 8])
    bins[5] = torch.tensor([30, 16.5, 18])
    assert calibration_error(bins) == pytest.approx((10 * 0.15 + 30 * 0.05) / 40)
    assert calibration_error(torch.zeros(BINS, 3, dtype=torch.float64)) == 0.0


def test_calibration_bins_are_those_of_the_drafts_own_confidence() -> None:
    case = Case()
    mask, last = case.rows("strict", S).flatten(1), case.last.flatten(0, 1)
    weights = step_weights(mask, last, case.teacher, LossConfig(), decay=0.8, counts_S=None)
    hidden = case.hidden.flatten(1, 2)
    out = draft_loss(hidden, case.head, last, _All(mask), weights, case.teacher, LossConfig())
    expected = torch.zeros(BINS, 3, dtype=torch.float64)
    for step, row in mask.nonzero().tolist():
        q = (hidden[step, row] @ case.head.T).softmax(-1)
        right = case.kept[q.argmax()] == (last[row + 1 + step] @ case.teacher.head.T).argmax()
        expected[int(q.max() * BINS)] += torch.tensor([1.0, float(q.max()), float(right)], dtype=torch.float64)
    torch.testing.assert_close(out.calibration, expected, rtol=1e-5, atol=1e-5)


class _Largest(TorchDispatchMode):
    """Values of the largest tensor that any operation makes."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.values = max(self.values, tensor.numel())
        return out


def test_memory_does_not_grow_with_vocabulary_times_tokens() -> None:
    """Four times the tokens: no tensor gets larger than a chunk's logits of all steps."""
    generator, vocab, draft_vocab = torch.Generator().manual_seed(0), 2048, 1024
    teacher = Teacher(torch.randn(vocab, 48, generator=generator), target_info(), torch.arange(draft_vocab))
    head = torch.randn(draft_vocab, H, generator=generator).requires_grad_()
    config, largest = LossConfig(chunk_bytes=1 << 20), []
    for rows in (256, 1024):
        mask = torch.ones(3, rows, dtype=torch.bool)
        hidden = torch.randn(3, rows, H, generator=generator).requires_grad_()
        last = torch.randn(rows, 48, generator=generator)
        weights = step_weights(mask, last, teacher, config, decay=0.8, counts_S=None)
        with _Largest() as seen:
            draft_loss(hidden, head, last, _All(mask), weights, teacher, config).loss.backward()
        largest.append(seen.values)
    assert largest[0] == largest[1] < 256 * draft_vocab


class _HostReads(TorchDispatchMode):
    """Counts what makes the host wait for a GPU: sizes or values that depend on the data."""

    waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in ("nonzero", "_local_scalar_dense", "masked_select") or any(
            index is not None and index.dtype == torch.bool for index in indices
        ):
            self.waits += 1
        return func(*args, **(kwargs or {}))


def test_no_chunk_makes_the_host_wait_for_the_gpu() -> None:
    """Small chunks once cost 0.4 s per step on an H200: each waited for its kernels a dozen times."""
    case, waits = Case(), []
    for chunk_bytes in (1 << 30, 1 << 16):
        with _HostReads() as seen:
            case.ours(LossConfig(chunk_bytes=chunk_bytes), "strict", 0.8)
        waits.append(seen.waits)
    assert waits[0] == waits[1] < 5
