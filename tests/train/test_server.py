"""A draft in the real SGLang on CPU: never changes the answer, and is accepted as often as the simulation says."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_data.train.eval_prompts import EvalPrompt
from eagle3_data.train.evaluate import EvalConfig, EvalReport, Measured, evaluate_draft, measure_plain
from eagle3_data.train.export import export_draft
from eagle3_data.train.trainer import Trainer, TrainReport
from tests.train.conftest import MakeConfig
from tests.train.fakes import MemorySamples, target_samples

pytestmark = pytest.mark.server

DRAFT_TOKENS = 5
ANSWER = 32
PROMPTS = [[random.Random(seed).randrange(10, 700) for _ in range(20)] for seed in range(2)]
LEARNT = 0
"""The prompt that the draft is overfitted to."""


@pytest.fixture(scope="module")
def eval_config(sharp_target: Path) -> EvalConfig:
    return EvalConfig(
        target=str(sharp_target), draft_tokens=DRAFT_TOKENS, max_new_tokens=ANSWER, device="cpu", dtype="float32"
    )


@pytest.fixture(scope="module")
def prompts() -> list[EvalPrompt]:
    return [EvalPrompt(str(i), "learnt" if i == LEARNT else "new", tuple(ids)) for i, ids in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def plain(eval_config: EvalConfig, prompts: list[EvalPrompt]) -> Measured:
    return measure_plain(prompts, eval_config)


@pytest.fixture
def learnt(sharp_target: Path, make_config: MakeConfig) -> tuple[MemorySamples, TrainReport]:
    """Trained on one conversation alone, and evaluated on it."""
    data = target_samples(str(sharp_target), PROMPTS, answer_tokens=ANSWER, layers=(1, 3, 4))
    one = MemorySamples(data.capture, [data.samples[LEARNT]] * 2)
    config = make_config(
        f"ttt.steps={DRAFT_TOKENS}",
        f"run.simulate_draft_tokens={DRAFT_TOKENS}",
        "data.holdout_share=0.5",
        "batch.batches_per_step=1",
        "optim.lr=0.004",
        "optim.epochs=120",
        "run.eval_every_steps=1000",
        target=sharp_target,
    )
    return data, Trainer(config, one).run()


def evaluate(run: Path, out: Path, config: EvalConfig, prompts: list[EvalPrompt], plain: Measured) -> EvalReport:
    export_draft(run, out, dtype="float32", draft_tokens=DRAFT_TOKENS)
    return evaluate_draft(out, prompts, config, plain=plain)


def test_an_overfitted_draft_is_accepted_as_the_simulation_says(
    learnt: tuple[MemorySamples, TrainReport],
    tmp_path: Path,
    eval_config: EvalConfig,
    prompts: list[EvalPrompt],
    plain: Measured,
) -> None:
    data, trained = learnt
    assert trained.heldout is not None
    report = evaluate(trained.output, tmp_path / "export", eval_config, prompts, plain)
    for answer in plain.answers:  # our recorded answers are the server's
        assert list(answer.output_ids) == data.samples[int(answer.prompt.id)]["input_ids"][-ANSWER:].tolist()
    assert report.equal_answers == len(prompts)  # greedy output with the draft equals greedy output without
    served, simulated = report.by_category["learnt"].acceptance_length, trained.heldout.acceptance_length
    assert served > 4
    assert served == pytest.approx(simulated, rel=0.1)
    assert report.by_category["new"].verifications > 0


def test_an_untrained_draft_changes_no_answer(
    sharp_target: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    eval_config: EvalConfig,
    prompts: list[EvalPrompt],
    plain: Measured,
) -> None:
    """With every switch on, and a draft of another shape than the target's."""
    data = target_samples(str(sharp_target), PROMPTS[:2], answer_tokens=4, layers=(1, 3, 4))
    config = make_config(
        "draft.fc_norm=true",
        "draft.norm_output=true",
        "draft.num_attention_heads=2",
        "draft.num_key_value_heads=1",
        "draft.head_dim=32",
        "draft.intermediate_size=96",
        "draft.head_init=random",
        "draft.fc_init=random",
        "optim.max_steps=1",
        target=sharp_target,
    )
    trained = Trainer(config, data).run()
    short = replace(eval_config, draft_tokens=3)
    report = evaluate(trained.output, tmp_path / "export", short, prompts, plain)
    assert report.equal_answers == len(prompts)
    assert report.overall.acceptance_length < 2
