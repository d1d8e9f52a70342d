"""Kernels of speculative decoding: the tree of draft tokens of each request, and its greedy verification.

B requests, n draft tokens of each (the root among them). A tree is three tables of n entries a request: `retrive_index`
(its place in the flat batch), `retrive_next_token` (first child) and `retrive_next_sibling`; -1 is none.
"""

from torch import Tensor

FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING = 0, 1, 2


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = FULL_MASK,
) -> None:
    """Fill the tree's tables, its attention mask and its positions from the selected draft tokens."""
    mode, n = int(tree_mask_mode), draft_token_num
    if mode == QLEN_ONLY_BITPACKING:
        raise NotImplementedError("sgl_kernel stand-in: bit-packed tree masks")
    selected = selected_index.tolist()
    parents = parent_list.reshape(len(selected), -1).tolist()
    mask, position = tree_mask.reshape(-1), positions.reshape(-1)
    place, child, sibling = (t.reshape(-1) for t in (retrive_index, retrive_next_token, retrive_next_sibling))
    prefix = 0
    for b, length in enumerate(verified_seq_len.tolist()):
        above = [_parent(j, selected[b], parents[b], topk, n) for j in range(n - 1)]
        base = b * n
        place[base] = base
        for i in range(n - 1, 0, -1):
            place[base + i] = base + i
            parent = above[i - 1]
            if parent is not None:
                first = int(child[base + parent])
                child[base + parent] = i
                if first != -1:
                    sibling[base + i] = first
        tree = n * n * b + prefix * n
        position[base] = length
        for token in range(n):
            row = tree + (length + n) * token + length if mode == FULL_MASK else n * n * b + n * token
            mask[row] = True
            mask[row + 1 : row + n] = False
            current: int | None = token
            steps = 0
            while current and steps < depth:
                steps += 1
                mask[row + current] = True
                current = above[current - 1]
            if token:
                position[base + token] = length + steps
        prefix += length


def _parent(j: int, selected: list[int], parents: list[int], topk: int, n: int) -> int | None:
    """Place in the draft (0 is the root) of the parent of the j-th selected token; None when it was not selected."""
    group = selected[j] // topk
    if group == 0:
        return 0
    try:
        return selected[: n - 1].index(parents[group]) + 1
    except ValueError:
        return None


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow each tree as long as a child is the target's own choice; writes what was accepted."""
    size, n = candidates.shape
    target = target_predict.reshape(-1).tolist()
    tables = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    tokens, place, child, sibling = (t.reshape(size, n).tolist() for t in tables)
    for b in range(size):
        last, accepted, current = place[b][0], 0, 0
        accept_index[b, 0] = last
        for _ in range(1, accept_index.shape[1]):
            current = child[b][current]
            while current != -1 and tokens[b][current] != target[last]:
                current = sibling[b][current]
            if current == -1:
                break
            predicts[last] = target[last]
            accepted += 1
            last = place[b][current]
            accept_index[b, accepted] = last
        accept_token_num[b] = accepted
        predicts[last] = target[last]
