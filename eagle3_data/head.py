"""The target's head: last states to logits. Read alone from the checkpoint, used by builders and `verify`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from eagle3_data.checkpoint import logit_scale, read_head, resolve_checkpoint, text_config
from eagle3_data.errors import ConfigError

CHUNK_BYTES = 128 << 20
"""Float32 logits at once: 200 rows of Kimi-K2.5's 163,840 tokens."""
LOWEST = float(torch.finfo(torch.float16).min)


@dataclass(frozen=True, slots=True)
class TargetHead:
    """`weight` [V, W] on the device and in the dtype that the products are made in."""

    weight: Tensor
    scale: float = 1.0
    """Factor on the logits (Cohere, Granite)."""
    softcap: float | None = None
    """Gemma-2: logits = cap * tanh(logits / cap)."""

    @classmethod
    def load(cls, model: str, *, width: int, device: str = "cpu") -> TargetHead:
        """From a folder or hub id. bf16 weights are used as float32 on a CPU, where bf16 products are slow.

        Raises ConfigError when there is no such head, or it is for states of another width.
        """
        folder = resolve_checkpoint(model)
        try:
            text = text_config(json.loads((folder / "config.json").read_text()))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read {folder / 'config.json'}: {error}", next="--head: the target's checkpoint"
            ) from None
        weight, _ = read_head(folder, text, width=width)
        softcap = text.get("final_logit_softcapping")
        moved = weight.float() if device == "cpu" else weight.to(device)
        return cls(moved.contiguous(), logit_scale(text), float(softcap) if softcap else None)

    @property
    def vocab_size(self) -> int:
        return int(self.weight.shape[0])

    def digest(self) -> str:
        """XXH3-128 of the weights and factors, hex: part of the fingerprint of data that depends on them."""
        data: Any = self.weight.detach().cpu().float().contiguous().view(torch.uint8).numpy()
        digest = xxhash.xxh3_128(memoryview(data).cast("B"))
        digest.update(f"{self.scale} {self.softcap}".encode())
        return digest.hexdigest()

    @torch.inference_mode()
    def logits(self, last_TW: Tensor) -> Tensor:
        """float32 [T, V] on the head's device, of post-norm last states."""
        logits = (last_TW.to(self.weight.device, self.weight.dtype) @ self.weight.T).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    @torch.inference_mode()
    def top(self, last_TW: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable tokens, most probable first: ids int32 [T, k], their log-probabilities float16 [T, k].

        Log-probabilities are over the whole vocabulary, so what is missing to 1 is the mass outside the k.
        """
        rows = max(1, CHUNK_BYTES // (4 * self.vocab_size))
        ids = torch.empty(len(last_TW), k, dtype=torch.int32)
        logprobs = torch.empty(len(last_TW), k, dtype=torch.float16)
        for low in range(0, len(last_TW), rows):
            logits = self.logits(last_TW[low : low + rows])
            best = logits.topk(k, dim=-1)
            ids[low : low + rows] = best.indices.to(torch.int32).cpu()
            found = best.values - logits.logsumexp(-1, keepdim=True)
            logprobs[low : low + rows] = found.clamp_min(LOWEST).to(torch.float16).cpu()
        return ids, logprobs
