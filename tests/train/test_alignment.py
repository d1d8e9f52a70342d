"""Every alignment against the situation it claims to be: serving for 'strict', the rivals' shifts for the others."""

from __future__ import annotations

import torch

from eagle3_data.train.alignment import answer_spans, row_masks, step_inputs

STEPS = 4
MASK = [0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1]
"""Two turns: answers x3..x6 and x9..x11."""


def served_rows(mask: list[int], steps: int) -> set[tuple[int, int]]:
    """(step, row) pairs a server meets: with x_e the last emitted token, the draft runs from row e-1."""
    met = set()
    for first, last in answer_spans(torch.tensor(mask)):
        for emitted in range(first, last + 1):
            for step in range(steps):
                predicted = emitted + 1 + step
                if predicted <= last:  # what lies beyond is not part of the answer
                    met.add((step, emitted - 1))
    return met


def masked(mask: list[int], document: list[int], alignment: str) -> set[tuple[int, int]]:
    rows = row_masks(torch.tensor([mask]), torch.tensor([document]), steps=STEPS, alignment=alignment)  # type: ignore[arg-type]
    return {(int(step), int(row)) for step, _, row in rows.nonzero()}


def test_strict_is_exactly_what_serving_meets() -> None:
    assert masked(MASK, [0] * len(MASK), "strict") == served_rows(MASK, STEPS)


def test_legacy_and_input_are_the_rivals_shifts() -> None:
    length = len(MASK)
    for alignment, ahead in (("legacy", 0), ("input", 1)):
        expected = {
            (step, t)
            for step in range(STEPS)
            for t in range(length)
            if t + step + ahead < length and MASK[t + step + ahead] and t + 1 + step < length
        }
        assert masked(MASK, [0] * length, alignment) == expected


def test_legacy_leaves_out_the_first_draft_of_an_answer_and_trains_one_past_its_end() -> None:
    strict, legacy = (masked(MASK, [0] * len(MASK), name) for name in ("strict", "legacy"))
    assert (0, 2) in strict
    assert (0, 2) not in legacy  # row 2: input x3, the answer's first token
    assert (0, 6) in legacy
    assert (0, 6) not in strict  # row 6: input x7, past the answer


def test_documents_of_a_packed_row_do_not_touch() -> None:
    first, second = [0, 1, 1, 1], [0, 0, 1, 1, 1]
    document = [0] * 4 + [1] * 5 + [-1] * 2
    packed = [*first, *second, 1, 1]  # a mask of ones on padding must not count
    for alignment in ("strict", "input", "legacy"):
        alone = masked(first, [0] * 4, alignment) | {(s, t + 4) for s, t in masked(second, [0] * 5, alignment)}
        assert masked(packed, document, alignment) == alone


def test_each_row_sees_the_token_that_serving_would_feed() -> None:
    ids, document = torch.arange(10, 19)[None], torch.tensor([[0] * 4 + [1] * 5])
    assert step_inputs(ids, document, 0).tolist() == [[11, 12, 13, 0, 15, 16, 17, 18, 0]]
    assert step_inputs(ids, document, 2).tolist() == [[13, 0, 0, 0, 17, 18, 0, 0, 0]]


def test_answer_spans() -> None:
    assert answer_spans(torch.tensor(MASK)) == [(3, 6), (9, 11)]
    assert answer_spans(torch.zeros(3)) == []
