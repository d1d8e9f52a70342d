"""The unrolled draft equals a draft decoded token by token, and both attention ways equal each other."""

from __future__ import annotations

import pytest
import torch

from eagle3_data.train.alignment import row_masks
from eagle3_data.train.attention import FlexAttention, PlainAttention
from eagle3_data.train.config import LossConfig, TttConfig
from eagle3_data.train.draft import Eagle3Draft
from eagle3_data.train.rope import RopeSpec
from eagle3_data.train.target import TargetInfo
from eagle3_data.train.teacher import Teacher
from eagle3_data.train.ttt import Batch, TrainedRows, TttModel
from tests.train.reference import decoded_states, make_draft

STEPS = 4
YARN = RopeSpec(kind="yarn", factor=8.0, original_positions=16, theta=500.0)
VARIANTS: list[dict[str, object]] = [
    {},
    {"norm_output": True, "fc_norm": True},
    {"norm_before_fc": True, "num_key_value_heads": 4},
    {"sliding_window_tokens": 8},
    {"rope": YARN, "aux_layers": (0, 2, 4, 5)},
]


def target_info() -> TargetInfo:
    return TargetInfo(
        model="random",
        architecture="LlamaForCausalLM",
        num_layers=8,
        hidden_size=48,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=96,
        max_positions=4096,
        rms_norm_eps=1e-6,
        rope=RopeSpec(),
        tied_head=False,
        latent_attention=False,
    )


def make_model(draft: Eagle3Draft, attention: str = "plain", loss: LossConfig | None = None) -> TttModel:
    generator = torch.Generator().manual_seed(5)
    kept = torch.randperm(96, generator=generator)[: draft.spec.draft_vocab_size].sort().values
    teacher = Teacher(torch.randn(96, 48, generator=generator), target_info(), kept)
    return TttModel(draft, teacher, TttConfig(steps=STEPS), loss or LossConfig(), attention)  # type: ignore[arg-type]


def make_batch(rows: list[list[int]], length: int, *, aux_width: int, answer_from: int = 4, seed: int = 0) -> Batch:
    """`rows`: document lengths of each row."""
    generator = torch.Generator().manual_seed(seed)
    height = len(rows)
    document = torch.full((height, length), -1, dtype=torch.int32)
    positions = torch.zeros(height, length, dtype=torch.int32)
    mask = torch.zeros(height, length, dtype=torch.uint8)
    for row, lengths in enumerate(rows):
        start = 0
        for number, count in enumerate(lengths):
            document[row, start : start + count] = number
            positions[row, start : start + count] = torch.arange(count, dtype=torch.int32)
            mask[row, start + answer_from : start + count] = 1
            start += count
    return Batch(
        torch.randint(0, 96, (height, length), generator=generator) * (document >= 0),
        torch.randn(height, length, aux_width, generator=generator),
        torch.randn(height, length, 48, generator=generator),
        document,
        positions,
        row_masks(mask, document, steps=STEPS, alignment="strict"),
    )


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda c: ",".join(c) or "plain")
def test_unrolled_equals_decoded_token_by_token(changes: dict[str, object]) -> None:
    draft = make_draft(**changes)
    batch = make_batch([[19, 11], [24]], 32, aux_width=draft.spec.aux_width)
    rows = TrainedRows.of(batch)
    with torch.no_grad():
        unrolled = make_model(draft).unroll(batch, rows)
    compared = 0
    for row, number, start, count in ((0, 0, 0, 19), (0, 1, 19, 11), (1, 0, 0, 24)):
        assert bool((batch.document[row, start : start + count] == number).all())
        ids, aux = batch.input_ids[row, start : start + count], batch.aux[row, start : start + count]
        expected = decoded_states(draft, ids, aux, STEPS)
        for step, t in rows.mask_SN.view(STEPS, 2, 32)[:, row, start : start + count].nonzero().tolist():
            place = rows.place_N[row * 32 + start + t]
            torch.testing.assert_close(unrolled[step, place], expected[step, t], rtol=2e-4, atol=2e-4)
            compared += 1
    assert compared > 100


def test_padding_and_packing_do_not_change_loss_or_gradient() -> None:
    lengths = [17, 9, 22]
    separate = make_batch([[17], [9], [22]], 24, aux_width=144)
    packed = make_batch([lengths], 48, aux_width=144)
    for row, (start, count) in enumerate(((0, 17), (17, 9), (26, 22))):
        for name in ("input_ids", "aux", "last"):
            getattr(packed, name)[0, start : start + count] = getattr(separate, name)[row, :count]
    results = []
    for batch in (separate, packed):
        draft = make_draft()
        out = make_model(draft)(batch)
        out.loss.backward()
        results.append((out.loss.detach(), out.sums, {n: p.grad for n, p in draft.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    for name, grad in results[0][2].items():
        torch.testing.assert_close(grad, results[1][2][name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("window", [None, 6])
def test_flex_equals_plain(window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    document = torch.tensor([0] * 50 + [1] * 60 + [-1] * 18)
    active = torch.tensor([5, 7, 8, 30, 49, 50, 51, 90, 109])
    q = torch.randn(4, len(active), 16, generator=generator)
    k, v = torch.randn(2, 128, 16, generator=generator), torch.randn(2, 128, 16, generator=generator)
    for step in (0, 3):
        with torch.no_grad():
            plain = PlainAttention(document, active, window)(q, k, v, step)
            flex = FlexAttention(document, active, window, compiled=False)(q, k, v, step)
        torch.testing.assert_close(plain[0], flex[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(plain[1], flex[1], rtol=1e-5, atol=1e-5)


def test_a_batch_without_trained_rows_gives_zero_gradients_to_all() -> None:
    draft = make_draft()
    batch = make_batch([[]], 8, aux_width=144)
    out = make_model(draft)(batch)
    out.loss.backward()
    assert float(out.loss) == 0.0
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) == 0.0, name
