"""The target's distribution at a position: `head(last state)`, over the whole and over the draft vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle3_data.train.target import TargetInfo


@dataclass(frozen=True, slots=True)
class TeacherRows:
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
        logits = (last_CW.to(self.head.dtype) @ self.head.T).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    @torch.no_grad()
    def rows(self, last_CW: Tensor) -> TeacherRows:
        logits = self.logits(last_CW)  # [C, V]
        top1 = logits.argmax(-1)
        if self.draft_vocab_size == self.vocab_size:
            kept, coverage = logits, torch.ones_like(logits[:, 0])
        else:
            kept = logits[:, self.kept]  # [C, D]
            coverage = (kept.logsumexp(-1) - logits.logsumexp(-1)).exp()
        log_p = kept.log_softmax(-1)
        p = log_p.exp()
        return TeacherRows(top1, p, coverage, -(p * log_p).sum(-1))

    @torch.no_grad()
    def top1_in_draft(self, last_NW: Tensor, rows_per_chunk: int) -> Tensor:
        """bool [N]: the target's top-1 token is in the draft vocabulary."""
        parts = [self.in_draft[self.logits(part).argmax(-1)] for part in torch.split(last_NW, rows_per_chunk)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool, device=last_NW.device)
