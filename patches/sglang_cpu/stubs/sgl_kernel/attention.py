"""Attention of SGLang's `intel_amx` backend, the one that speculative decoding on a CPU needs.

B requests, T new tokens, H query heads, K key-value heads, D head width. Keys and values live in pools [slots, K, D].
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GATHER_ROWS = 1 << 16
"""Keys gathered at once, over all requests; bounds the memory of a decode step."""


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, mask: Tensor | None) -> Tensor:
    """q [n, H, D] over k, v [m, K, D] -> [n, H, D]; `cap` > 0 squashes the scores with tanh."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (t.to(q.dtype).repeat_interleave(repeats, 1).transpose(0, 1) for t in (k, v))
    q = q.transpose(0, 1)
    if cap and cap > 0:
        scores = torch.tanh((q.float() @ k.float().transpose(1, 2)) * scale / cap) * cap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        out = scores.softmax(-1).to(v.dtype) @ v
    else:
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(q[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
    return out.transpose(0, 1)


def _attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, seen: Tensor) -> Tensor:
    """q [B, H, D], one a request, over k, v [B, M, K, D], of which `seen` [B, M] counts -> [B, H, D].

    All requests at once: a loop over them takes most of a step, since each small operation waits for every core.
    """
    batch, heads, width = q.shape
    grouped = q.view(batch, k.shape[2], -1, width).float()  # [B, K, H/K, D]
    scores = grouped @ k.permute(0, 2, 3, 1).float() * scale  # [B, K, H/K, M]
    if cap and cap > 0:
        scores = torch.tanh(scores / cap) * cap
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    return (weights @ v.permute(0, 2, 1, 3).float()).view(batch, heads, width).to(q.dtype)


def _refuse(**asked: object) -> None:
    unsupported = [name for name, value in asked.items() if value]
    if unsupported:
        raise NotImplementedError(f"sgl_kernel stand-in: {', '.join(unsupported)}")


def decode_attention_cpu(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    o: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    logit_cap: float,
    is_cross_attn: bool = False,
    sliding_window: int | None = 0,
    encoder_lens: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """One new token a request, q [B, H, D]; stores `key` and `value` first, when given, and writes `o`."""
    _refuse(
        is_cross_attn=is_cross_attn,
        sliding_window=(sliding_window or 0) > 0,
        encoder_lens=encoder_lens is not None,
        sinks=sinks is not None,
    )
    if key is not None and value is not None:
        k_buffer[loc] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    longest = int(seq_lens.max())
    step = max(1, GATHER_ROWS // longest)
    for start in range(0, len(q), step):
        part = slice(start, start + step)
        lengths = seq_lens[part]
        slots = req_to_token[req_pool_indices[part].long(), :longest].long()
        seen = torch.arange(longest) < lengths[:, None]
        slots = slots.masked_fill(~seen, 0)  # beyond a request's end the table holds anything
        o[part] = _attend_one(q[part], k_buffer[slots], v_buffer[slots], scale, logit_cap, seen)


def extend_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_extend_len: int,
    scale: float,
    logit_cap: float,
    is_cross_attn: bool = False,
    sliding_window: int | None = 0,
    encoder_lens: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """Several new tokens a request, q [T, H, D], their keys already in the pool; `tree_mask` is [n, n] a request."""
    _refuse(
        is_cross_attn=is_cross_attn,
        sliding_window=(sliding_window or 0) > 0,
        encoder_lens=encoder_lens is not None,
        sinks=sinks is not None,
    )
    mask_at = 0
    rows = zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
        strict=False,
    )
    for row, length, count, start in rows:
        if count == 0:
            continue
        slots = req_to_token[row, :length].long()
        mask = torch.ones(count, length, dtype=torch.bool)
        if tree_mask is not None:
            tree = tree_mask.reshape(-1)[mask_at : mask_at + count * count]
            mask[:, length - count :] = tree.view(count, count).bool()
            mask_at += count * count
        elif is_causal:
            mask = mask.tril(length - count)
        queries = q[start : start + count]
        o[start : start + count] = _attend(queries, k_buffer[slots], v_buffer[slots], scale, logit_cap, mask)


def _older_too(kernel: Callable[..., None], scales_at: int) -> Callable[..., None]:
    """Take the arguments of SGLang before 0.5.23 as well, whose kernels know no scales of cached keys and values."""

    def call(*args: Any) -> None:
        known = not isinstance(args[scales_at], Tensor)
        kernel(*(args if known else (*args[:scales_at], 1.0, 1.0, *args[scales_at:])))

    return call


# SGLang calls these two through torch's operator namespace, with arguments by place.
for _kernel, _scales_at in ((decode_attention_cpu, 3), (extend_attention_cpu, 6)):
    setattr(torch.ops.sgl_kernel, _kernel.__name__, _older_too(_kernel, _scales_at))
