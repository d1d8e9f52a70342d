"""States as float8 e4m3 with one scale per token and state: half the bytes of bf16.

Each of a token's states (every aux layer, the last state) has its own scale, as layers differ by orders of magnitude:
scale = largest magnitude / 448, stored value = x / scale. So |x - x'| <= max(|x| / 16, scale / 1024), and then x' is
rounded to the dtype of the capture.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
BLOCK_BYTES = 32 << 20
"""Float32 scratch at once."""


def to_fp8(states_TGW: Tensor) -> tuple[Tensor, Tensor]:
    """(scale float32 [T, G], values float8_e4m3fn [T, G, W]) of finite states in any float dtype."""
    tokens, groups, width = states_TGW.shape
    scale = torch.empty(tokens, groups, dtype=torch.float32)
    values = torch.empty(tokens, groups, width, dtype=torch.float8_e4m3fn)
    for low, high in _blocks(tokens, groups * width):
        block = states_TGW[low:high].float()
        # the clamp keeps a token of zeros (or of denormals) from dividing by zero
        scale[low:high] = (block.abs().amax(-1) / E4M3_MAX).clamp_min(SMALLEST_SCALE)
        values[low:high] = (block / scale[low:high, :, None]).to(torch.float8_e4m3fn)
    return scale, values


def from_fp8(scale_TG: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """States [T, G*W] in `dtype`; `values` is [T, G*W]."""
    tokens, groups = scale_TG.shape
    out = torch.empty(values.shape, dtype=dtype)
    shaped, target = values.view(tokens, groups, -1), out.view(tokens, groups, -1)
    for low, high in _blocks(tokens, values.shape[-1]):
        target[low:high] = (shaped[low:high].float() * scale_TG[low:high, :, None]).to(dtype)
    return out


def _blocks(tokens: int, width: int) -> list[tuple[int, int]]:
    rows = max(1, BLOCK_BYTES // (4 * max(width, 1)))
    return [(low, min(low + rows, tokens)) for low in range(0, tokens, rows)]
