"""Which positions are trained at which draft step, and what each row's input token and target are.

Row t of a document, draft step i (0 first). x tokens, h aux states, y last states (y_t gives the logits of x_{t+1}),
m loss mask (m_t = 1: x_t belongs to an answer).

    input token   x_{t+1+i}             teacher-forced; the target's own token in serving
    input hidden  h_t at step 0, then the draft's own output of row t
    target        y_{t+1+i}             the distribution of x_{t+2+i}
    position      t + i

Serving, with the answer x_a .. x_b: the server prefills and emits x_a; the draft then runs from row t = a-1, whose
input token x_a is generated and whose target is x_{a+1}. So a row is met in serving at step i exactly when its input
token and all it predicts up to there are in the answer:

    strict  m_{t+1} & ... & m_{t+2+i}       what serving meets; the default
    input   m_{t+1+i}                       speculators
    legacy  m_{t+i}                         EAGLE, SpecForge, TorchSpec: leaves out the first draft of each answer and
                                            trains one position past its end

All three also need y_{t+1+i} to lie in the same document.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3_data.capture import Alignment


def shift_left(x_BT: Tensor, by: int, fill: int = 0) -> Tensor:
    """x[b, t + by], and `fill` past the end. Same shape and dtype."""
    if by == 0:
        return x_BT
    out = torch.full_like(x_BT, fill)
    if by < x_BT.shape[1]:
        out[:, :-by] = x_BT[:, by:]
    return out


def step_inputs(input_ids_BT: Tensor, document_BT: Tensor, step: int) -> Tensor:
    """Input tokens x_{t+1+step} of draft step `step`, 0 where that lies outside the row's document: int64 [B, T]."""
    inside = shift_left(document_BT, step + 1, -1) == document_BT
    return torch.where(inside, shift_left(input_ids_BT, step + 1), 0)


def row_masks(loss_mask_BT: Tensor, document_BT: Tensor, *, steps: int, alignment: Alignment) -> Tensor:
    """Trained rows, bool [S, B, T]: entry [i, b, t] for row t at step i. `document_BT` is -1 on padding."""
    answer = loss_mask_BT.bool() & (document_BT >= 0)
    real = document_BT >= 0

    def at(offset: int) -> tuple[Tensor, Tensor]:
        inside = (shift_left(document_BT, offset, -1) == document_BT) & real
        return inside, shift_left(answer.to(torch.uint8), offset).bool() & inside

    rows, run = [], at(1)[1]
    for step in range(steps):
        has_target, input_in_answer = at(step + 1)
        if alignment == "strict":
            run = run & at(step + 2)[1]
            rows.append(run)
        elif alignment == "input":
            rows.append(input_in_answer)
        else:
            rows.append(at(step)[1] & has_target)
    return torch.stack(rows)


def answer_spans(loss_mask_T: Tensor) -> list[tuple[int, int]]:
    """First and last position of each run of ones, for one document: uint8 or bool [T]."""
    padded = torch.nn.functional.pad(loss_mask_T.to(torch.int8), (1, 1))
    change = padded.diff()
    starts = (change == 1).nonzero().flatten().tolist()
    ends = (change == -1).nonzero().flatten().tolist()
    return [(start, end - 1) for start, end in zip(starts, ends, strict=True)]
