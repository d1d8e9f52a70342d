"""Bookkeeping kernels: which slots of the key-value pool belong to which token of which request.

B requests; `req_to_token` [requests, pool_len] maps a request's positions to slots of the pool. All results are written
into the tensors that the caller passes, as SGLang's kernels do.
"""

import ctypes

from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Give positions [start, end) of each request the next slots of `out_cache_loc`."""
    at = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=False):
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The other way round: read the slots of positions [start, end) into `out_cache_loc`."""
    at = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=False):
        out_cache_loc[at : at + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        at += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Slots of each request's draft tokens, which follow its sequence: topk branches of num_steps."""
    count = topk * num_steps
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=False)):
        slots = req_to_token[row, length : length + count]
        out_cache_loc[i * count : (i + 1) * count] = slots.to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """[B*topk, pool_len] slots: one row per request and branch, the prefix's, then that branch's draft slots."""
    table = req_to_token.new_zeros((len(req_pool_indices) * topk, pool_len))
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=False)):
        for branch in range(topk):
            start = length + branch * num_steps
            count = min(num_steps, pool_len - start)
            table[i * topk + branch, :length] = req_to_token[row, :length]
            table[i * topk + branch, length : length + count] = req_to_token[row, start : start + count]
    return table


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """The last accepted token of each request; `accept_tokens` is [B, accept_stride], flat."""
    tokens = accept_tokens.reshape(-1, accept_stride)
    for i, length in enumerate(accept_lens.tolist()):
        bonus_tokens[i] = tokens[i, length - 1]


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Slots of the accepted tokens, packed; -1 in `accept_index` means none."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one, and put its newest token in the place that frees."""
    newest = topk_index.reshape(-1)
    for i, (start, count) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=False)):
        if count > 0:
            input_ids[start : start + count - 1] = input_ids[start + 1 : start + count].clone()
            input_ids[start + count - 1 if select_index is None else int(select_index[i])] = newest[i]


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Move slots within every layer's buffer, given as addresses and bytes per slot."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(base + source * stride, stride) for source in sources]  # all read before any write
        for target, slot in zip(targets, slots, strict=True):
            ctypes.memmove(base + target * stride, slot, stride)
