"""Attention of the training-time test: causal over the keys of step 0, plus the diagonal of every later step.

Row t at draft step i sees K_0[t'] for t' <= t of its document and its own K_j[t] for j = 1..i: exactly what a draft
decoding i tokens after row t has in its cache, where accepted rows were recomputed from true states (EAGLE-3,
arXiv 2503.01840, figure 6). The first part does not change with i, so one mask serves all steps; its result and the few
diagonal terms are joined by their log-sum-exp, as FlashAttention joins blocks.

Nothing but a row itself ever looks at its later steps, so only trained rows are queries; the other rows (prompts,
padding) lend their keys of step 0 and cost nothing more.

Shapes: N rows of a flattened batch, R of them trained ("active"), H query heads, K key heads, D head width, J later
steps.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eagle3_data.train.fused import fused

QUERY_BLOCK = 256
FLEX_BLOCK = 128
KEEP_SCORES = 4 << 20
"""Scores (all heads, one step) up to which they are kept for the backward pass."""


class StepZeroAttention(Protocol):
    """Causal attention of the active rows over the keys of step 0: (out [H, R, D], lse float32 [H, R])."""

    def __call__(self, q_HRD: Tensor, k_KND: Tensor, v_KND: Tensor, step: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class _Block:
    """Active rows low..high (positions in `active`), all of one document, over its keys start..end."""

    start: int
    end: int
    low: int
    high: int


class PlainAttention:
    """Explicit scores, document by document, in blocks of queries. When the scores of a whole batch would be large the
    backward pass makes them again, so that memory stays at one block of them.

    `document_N`: a number per document, -1 on padding; `active_R`: ascending rows.
    """

    def __init__(self, document_N: Tensor, active_R: Tensor, window: int | None = None) -> None:
        self.active, self.window = active_R, window
        self._blocks = _document_blocks(document_N, active_R)
        self._scores = sum((block.high - block.low) * (block.end - block.start) for block in self._blocks)
        self._visible: dict[int, list[Tensor]] = {}

    def __call__(self, q_HRD: Tensor, k_KND: Tensor, v_KND: Tensor, step: int) -> tuple[Tensor, Tensor]:
        again = torch.is_grad_enabled() and self._scores * q_HRD.shape[0] > KEEP_SCORES
        outs, lses = [], []
        for block, visible in zip(self._blocks, self._masks(step), strict=True):
            keys = slice(block.start, block.end)
            args = (q_HRD[:, block.low : block.high], k_KND[:, keys], v_KND[:, keys], visible)
            made = checkpoint(_attend, *args, use_reentrant=False) if again else _attend(*args)
            out, lse = cast(tuple[Tensor, Tensor], made)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, dim=1), torch.cat(lses, dim=1)

    def _masks(self, step: int) -> list[Tensor]:
        """bool [queries, keys] of each block; without a window the same for all steps."""
        key = step if self.window is not None else 0
        if key not in self._visible:
            self._visible[key] = [self._mask(block, step) for block in self._blocks]
        return self._visible[key]

    def _mask(self, block: _Block, step: int) -> Tensor:
        query = self.active[block.low : block.high, None]
        key = torch.arange(block.start, block.end, device=query.device)
        visible = key <= query
        # the query stands at position t + step; its own later keys take `step` places of the window
        return visible if self.window is None else visible & (key > query + step - self.window)


def _document_blocks(document_N: Tensor, active_R: Tensor) -> list[_Block]:
    """Blocks of at most QUERY_BLOCK active rows; each ends its keys at its last row."""
    rows = active_R.tolist()
    numbers, counts = torch.unique_consecutive(document_N, return_counts=True)
    ends = counts.cumsum(0)
    starts = ends - counts
    first, last = torch.searchsorted(active_R, starts), torch.searchsorted(active_R, ends)
    blocks = [
        _Block(start, rows[min(low + QUERY_BLOCK, end) - 1] + 1, low, min(low + QUERY_BLOCK, end))
        for number, start, begin, end in torch.stack([numbers, starts, first, last]).T.tolist()
        for low in range(begin, end, QUERY_BLOCK)
        if number >= 0
    ]
    if sum(block.high - block.low for block in blocks) != len(rows):
        # a batch without any trained row keeps one row of padding active, which sees itself alone
        return [_Block(row, row + 1, at, at + 1) for at, row in enumerate(rows)]
    return blocks


def _attend(q_HRD: Tensor, k_KND: Tensor, v_KND: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    heads, rows, width = q_HRD.shape
    kv_heads = k_KND.shape[0]
    # the query heads of one key head go through one product
    q = q_HRD.reshape(kv_heads, -1, width)
    scores = torch.bmm(q, k_KND.transpose(1, 2)).float().view(kv_heads, heads // kv_heads, rows, -1)
    scores = (scores / math.sqrt(width)).masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    # with a window a late step may see no key of step 0 at all
    weights = (scores - lse.clamp_min(-1e30).unsqueeze(-1)).exp().to(v_KND.dtype)
    out = torch.bmm(weights.view(kv_heads, -1, weights.shape[-1]), v_KND)
    return out.view(heads, rows, width), lse.reshape(heads, rows)


class FlexAttention:
    """The same through torch's flex attention: a fused kernel on GPU, no scores in memory, block-sparse documents."""

    def __init__(
        self, document_N: Tensor, active_R: Tensor, window: int | None = None, *, compiled: bool = True
    ) -> None:
        self.document, self.window, self.compiled = document_N, window, compiled
        self.rows = len(active_R)
        # always some padding: what comes back then has the same form for all batches, and is compiled for once
        self.padded = (self.rows // FLEX_BLOCK + 1) * FLEX_BLOCK
        self.active = torch.nn.functional.pad(active_R, (0, self.padded - self.rows))
        self._masks: dict[int, Any] = {}

    def __call__(self, q_HRD: Tensor, k_KND: Tensor, v_KND: Tensor, step: int) -> tuple[Tensor, Tensor]:
        q = torch.nn.functional.pad(q_HRD, (0, 0, 0, self.padded - self.rows))
        out, lse = _flex(self.compiled)(
            q[None].contiguous(),
            k_KND[None].contiguous(),
            v_KND[None].contiguous(),
            self._mask(step),
            q_HRD.shape[0] != k_KND.shape[0],
        )
        return out[0, :, : self.rows], lse[0, :, : self.rows].float()

    def _mask(self, step: int) -> Any:
        key = step if self.window is not None else 0
        if key not in self._masks:
            from torch.nn.attention.flex_attention import create_block_mask

            document, active, window = self.document, self.active, self.window

            def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
                row = active[q]
                allowed = (kv <= row) & (document[row] == document[kv])
                return allowed if window is None else allowed & (kv > row + step - window)

            device = str(document.device)
            self._masks[key] = create_block_mask(visible, None, None, self.padded, len(document), device=device)
        return self._masks[key]


def _flex_with_lse(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, enable_gqa: bool) -> tuple[Tensor, Tensor]:
    from torch.nn.attention import flex_attention as flex

    if hasattr(flex, "AuxRequest"):  # torch 2.9 and newer
        request = flex.AuxRequest(lse=True)
        out, aux = flex.flex_attention(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa, return_aux=request)
        return out, cast(Tensor, aux.lse)
    return flex.flex_attention(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa, return_lse=True)


@functools.cache
def _flex(compiled: bool) -> Any:
    return torch.compile(_flex_with_lse, dynamic=True) if compiled else _flex_with_lse


def make_attention(
    kind: Literal["plain", "flex"], document_N: Tensor, active_R: Tensor, window: int | None
) -> PlainAttention | FlexAttention:
    chosen = FlexAttention if kind == "flex" else PlainAttention
    return chosen(document_N, active_R, window)


class TttCache:
    """Keys and values of one unrolled batch: all rows of step 0, and the active rows of each later step."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, q_HRD: Tensor, k_KMD: Tensor, v_KMD: Tensor, step_zero: StepZeroAttention) -> Tensor:
        """Add this step's keys and values (M = N rows at step 0, R later); returns [H, R, D] in the queries' dtype."""
        self.keys.append(k_KMD)
        self.values.append(v_KMD)
        out, lse = step_zero(q_HRD, self.keys[0], self.values[0], len(self.keys) - 1)
        if len(self.keys) == 1:
            return out.contiguous()
        return _with_own(q_HRD, out, lse, torch.stack(self.keys[1:]), torch.stack(self.values[1:]))


@fused
def _with_own(q_HRD: Tensor, out_HRD: Tensor, lse_HR: Tensor, keys_JKRD: Tensor, values_JKRD: Tensor) -> Tensor:
    """Attention over the keys of step 0, of which `out` and `lse` are known, and each row's own J later keys."""
    (heads, rows, width), kv_heads = q_HRD.shape, keys_JKRD.shape[1]
    grouped = (kv_heads, heads // kv_heads, rows)
    q = q_HRD.float().view(*grouped, width)  # [K, G, R, D]
    own = (q * keys_JKRD[:, :, None].float()).sum(-1) / math.sqrt(width)  # [J, K, G, R]
    first = lse_HR.view(grouped)  # [K, G, R]
    largest = torch.maximum(first, own.amax(0))
    first, own = (first - largest).exp(), (own - largest).exp()
    later = (own[..., None] * values_JKRD[:, :, None].float()).sum(0)  # [K, G, R, D]
    mixed = (out_HRD.float().view(q.shape) * first[..., None] + later) / (first + own.sum(0))[..., None]
    return mixed.view(q_HRD.shape).to(q_HRD.dtype)
