"""The simulated walk on answers small enough to follow by hand."""

from __future__ import annotations

import torch

from eagle3_data.train.simulate import Walk, chain_lengths, walk_answers


def test_a_perfect_draft_emits_k_plus_one_per_verification() -> None:
    mask = torch.tensor([0, 0] + [1] * 9)  # x2..x10: one token from the prefill, eight to verify
    correct = torch.ones(3, 11, dtype=torch.bool)
    assert walk_answers(correct, mask, 3) == Walk(emitted=9, verifications=2, accepted=6)


def test_a_useless_draft_emits_one() -> None:
    mask = torch.tensor([0, 0] + [1] * 9)
    walk = walk_answers(torch.zeros(3, 11, dtype=torch.bool), mask, 3)
    assert walk == Walk(emitted=9, verifications=8, accepted=0)


def test_the_walk_starts_each_draft_at_the_row_before_the_last_emitted_token() -> None:
    """x0 x1 | x2 .. x7. From row 1 one right token (x3), the target adds x4; from row 3 none, x5; from row 4 x6, x7."""
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])
    correct = torch.zeros(2, 8, dtype=torch.bool)
    correct[0, 1] = True  # x3 right, x4 wrong
    correct[0, 2] = correct[1, 2] = True  # never started from
    correct[0, 4] = correct[1, 4] = True  # x6, x7 right
    assert walk_answers(correct, mask, 2) == Walk(emitted=6, verifications=3, accepted=3)


def test_a_late_right_token_after_a_wrong_one_does_not_count() -> None:
    assert chain_lengths(torch.tensor([[True, False], [False, True], [True, True]]), 3) == [1, 0]
    assert chain_lengths(torch.tensor([[True, True], [True, True], [True, True]]), 2) == [2, 2]


def test_answers_add_up_and_one_without_a_prompt_is_left_out() -> None:
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 1])
    walk = walk_answers(torch.zeros(2, 7, dtype=torch.bool), mask, 2)
    assert walk == Walk(emitted=3, verifications=1, accepted=0)
    assert Walk().acceptance_length == 1.0
