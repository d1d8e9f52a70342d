"""The target's distribution at a position: `head(last state)`, over the whole and over the draft vocabulary.

Data with `--last topk:K` holds the K most probable tokens instead of the last state (`TopKTeacher`). What lies outside
the K counts as outside the draft's vocabulary: the distribution that is learnt is renormalised over the kept tokens
that the draft has, and `coverage` is their true share, so the LK losses and the acceptance metric see a lower bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from eagle3_data.train.fused import fused
from eagle3_data.train.target import TargetInfo


class TeacherRows(NamedTuple):
    """C positions. V target vocabulary, D draft vocabulary."""

    top1_C: Tensor
    """int64 target ids of the largest logits over the whole vocabulary."""
    draft_CD: Tensor
    """float32 probabilities renormalised over the draft vocabulary."""
    coverage_C: Tensor
    """float32 probability of the whole draft vocabulary; draft_CD * coverage_C are the target's own probabilities."""
    entropy_C: Tensor
    """float32 entropy of draft_CD in nats."""


class Teacher(nn.Module):
    """Frozen head of the target and the draft vocabulary's ids in it; buffers outside the state dict."""

    head: Tensor
    kept: Tensor
    in_draft: Tensor

    def __init__(self, head_VW: Tensor, info: TargetInfo, kept_ids_D: Tensor) -> None:
        super().__init__()
        self.scale, self.softcap = info.logit_scale, info.logit_softcap
        self.vocab_size, self.draft_vocab_size = head_VW.shape[0], kept_ids_D.shape[0]
        in_draft = torch.zeros(self.vocab_size, dtype=torch.bool)
        in_draft[kept_ids_D] = True
        self.register_buffer("head", head_VW, persistent=False)
        self.register_buffer("kept", kept_ids_D, persistent=False)
        self.register_buffer("in_draft", in_draft, persistent=False)

    def logits(self, last_CW: Tensor) -> Tensor:
        """float32 logits [C, V] of post-norm last states."""
        return _scaled(self._products(last_CW), self.scale, self.softcap)

    def _products(self, last_CW: Tensor) -> Tensor:
        return last_CW.to(self.head.dtype) @ self.head.T

    @torch.no_grad()
    def rows(self, last_CW: Tensor) -> TeacherRows:
        kept = self.kept if self.draft_vocab_size < self.vocab_size else None
        return TeacherRows(*_distributions(self._products(last_CW), kept, self.scale, self.softcap))

    @torch.no_grad()
    def top1(self, last_NW: Tensor) -> Tensor:
        """int64 [N]: the target's most probable token."""
        return self.logits(last_NW).argmax(-1)

    @torch.no_grad()
    def top1_in_draft(self, last_NW: Tensor, rows_per_chunk: int) -> Tensor:
        """bool [N]: the target's top-1 token is in the draft vocabulary."""
        parts = [self.in_draft[self.top1(part)] for part in torch.split(last_NW, rows_per_chunk)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool, device=last_NW.device)


def _scaled(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    logits = logits.float()
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@fused
def _distributions(
    logits_CV: Tensor, kept_D: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `TeacherRows` from the head's products [C, V]; `kept_D` None: the whole vocabulary."""
    logits = _scaled(logits_CV, scale, softcap)
    kept = logits if kept_D is None else logits[:, kept_D]  # [C, D]
    whole = kept.logsumexp(-1)
    coverage = torch.ones_like(whole) if kept_D is None else (whole - logits.logsumexp(-1)).exp()
    log_p = kept - whole[:, None]
    p = log_p.exp()
    return logits.argmax(-1), p, coverage, -(p * log_p).sum(-1)


def pack_top(ids_TK: Tensor, logprobs_TK: Tensor) -> Tensor:
    """int32 [T, 2K]: ids, then the bits of the log-probabilities as float32; no cast of states can touch it."""
    return torch.cat([ids_TK.to(torch.int32), logprobs_TK.float().view(torch.int32)], dim=-1)


class TopKTeacher(Teacher):
    """Takes `pack_top` rows where `Teacher` takes last states; needs no head."""

    slot: Tensor

    def __init__(self, info: TargetInfo, kept_ids_D: Tensor, device_dtype: torch.dtype = torch.float32) -> None:
        super().__init__(torch.empty(info.vocab_size, 0, dtype=device_dtype), info, kept_ids_D)
        slot = torch.full((info.vocab_size,), -1, dtype=torch.int64)
        slot[kept_ids_D] = torch.arange(len(kept_ids_D))
        self.register_buffer("slot", slot, persistent=False)

    def logits(self, last_CW: Tensor) -> Tensor:
        raise AssertionError("top-k data has no logits over the whole vocabulary")

    @torch.no_grad()
    def rows(self, last_CW: Tensor) -> TeacherRows:
        ids, bits = last_CW.chunk(2, dim=-1)  # [C, K]
        ids = ids.long()
        slots = self.slot[ids]  # [C, K]
        p = bits.contiguous().view(torch.float32).exp() * (slots >= 0)
        draft = torch.zeros(len(ids), self.draft_vocab_size, dtype=torch.float32, device=ids.device)
        draft.scatter_add_(1, slots.clamp_min(0), p)
        coverage = draft.sum(-1)  # [C]
        # nothing of the K is in the draft's vocabulary: nothing is known there, so no token is preferred
        draft = torch.where(
            coverage[:, None] > 0,
            draft / coverage.clamp_min(torch.finfo(torch.float32).tiny)[:, None],
            1 / self.draft_vocab_size,
        )
        return TeacherRows(ids[:, 0], draft, coverage, -torch.special.xlogy(draft, draft).sum(-1))

    @torch.no_grad()
    def top1(self, last_NW: Tensor) -> Tensor:
        return last_NW[:, 0].long()
