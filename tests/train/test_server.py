"""A draft in the real SGLang on CPU: never changes the answer, and is accepted as often as the simulation says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from eagle3_data.errors import ServerUnfit
from eagle3_data.protocol import IDS
from eagle3_data.server.process import ServerProcess
from eagle3_data.train.config import DataConfig
from eagle3_data.train.eval_hints import hints
from eagle3_data.train.eval_prompts import EvalPrompt, heldout_prompts
from eagle3_data.train.evaluate import EvalReport, evaluate_beside, evaluate_draft, server_config
from eagle3_data.train.export import export_draft
from eagle3_data.train.measure import Decoder, EvalConfig, Measured, measure
from eagle3_data.train.plan import split_samples
from eagle3_data.train.trainer import Trainer, TrainReport
from tests.train.conftest import MakeConfig
from tests.train.fakes import MemorySamples, target_samples

pytestmark = pytest.mark.server

ALL_STEPS = 7
ANSWER = 1 + 4 * (ALL_STEPS + 1)
"""One token of the prefill, and four verifications of a draft that is always right."""
HOLDOUT = 0.2
PROMPTS = [[random.Random(seed).randrange(10, 700) for _ in range(20)] for seed in range(20)]


@dataclass(frozen=True)
class Asked:
    """Conversations, which of them are held out, and what the server answers without a draft."""

    data: MemorySamples
    learnt: int
    """A training conversation."""
    heldout: list[int]
    prompts: list[EvalPrompt]
    """The learnt one's, then the held-out ones'."""
    plain: Measured
    plain_url: str
    """Of a server without a draft, which sleeps while nobody asks it."""
    config: EvalConfig


@pytest.fixture(scope="module")
def asked(sharp_target: Path) -> Iterator[Asked]:
    data = target_samples(str(sharp_target), PROMPTS, answer_tokens=ANSWER, layers=(1, 3, 4))
    split = split_samples(data.keys, data.tokens, DataConfig(folder=Path("unused"), holdout_share=HOLDOUT), seed=0)
    learnt, heldout = int(split.train[0]), split.holdout.tolist()
    prompts = [replace(prompt, category="learnt") for prompt in heldout_prompts(data, [learnt], limit=None)]
    prompts += [replace(prompt, category="new") for prompt in heldout_prompts(data, heldout, limit=None)]
    config = EvalConfig(target=str(sharp_target), max_new_tokens=ANSWER, concurrency=50, device="cpu", dtype="float32")
    with ServerProcess(server_config(config, None)) as server:
        (plain,) = asyncio.run(measure([Decoder(server.url, False)], prompts, config))
        for sample, answer in zip([learnt, *heldout], plain.answers, strict=True):
            assert list(answer.output_ids) == data.samples[sample][IDS][-ANSWER:].tolist()  # recorded as it is served
        yield Asked(data, learnt, heldout, prompts, plain, server.url, config)


def served(trained: TrainReport, out: Path, asked: Asked, *, draft_tokens: int) -> EvalReport:
    export_draft(trained.output, out, dtype="float32", draft_tokens=draft_tokens)
    report = evaluate_draft(out, asked.prompts, replace(asked.config, draft_tokens=draft_tokens), plain=asked.plain)
    assert report.equal_answers == len(asked.prompts)  # greedy output with the draft equals greedy output without
    return report


def test_a_draft_overfitted_to_one_conversation_is_always_right_on_it(
    asked: Asked, sharp_target: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    one = MemorySamples(asked.data.capture, [asked.data.samples[asked.learnt]] * 2)
    config = make_config(
        f"ttt.steps={ALL_STEPS}",
        f"run.simulate_draft_tokens={ALL_STEPS}",
        "data.holdout_share=0.5",  # the same conversation
        "batch.batches_per_step=1",
        "optim.lr=0.004",
        "optim.epochs=120",
        "run.eval_every_steps=1000",
        target=sharp_target,
    )
    trained = Trainer(config, one).run()
    assert trained.heldout is not None
    walk = trained.heldout.walk
    assert (walk.accepted, walk.verifications) == (ALL_STEPS * 4, 4)  # 7 of 7, every time
    report = served(trained, tmp_path / "export", asked, draft_tokens=ALL_STEPS)
    length = report.by_category["learnt"].acceptance_length
    assert length > 4
    assert length == pytest.approx(walk.acceptance_length, rel=0.1)


def test_a_draft_is_accepted_on_heldout_prompts_as_the_simulation_says(
    asked: Asked, sharp_target: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    """With every switch on, and a draft of another shape than the target's; beside a server without one."""
    config = make_config(
        "draft.fc_norm=true",
        "draft.norm_output=true",
        "draft.num_attention_heads=2",
        "draft.num_key_value_heads=1",
        "draft.head_dim=32",
        "draft.intermediate_size=96",
        f"data.holdout_share={HOLDOUT}",
        "batch.micro_batch_tokens=512",
        "batch.batches_per_step=1",
        "optim.lr=0.004",
        "optim.epochs=40",
        "run.eval_every_steps=1000",
        target=sharp_target,
    )
    trained = Trainer(config, asked.data).run()
    assert trained.heldout is not None
    export, twice = tmp_path / "export", replace(asked.config, rounds=2)
    export_draft(trained.output, export, dtype="float32", draft_tokens=3)
    with ServerProcess(server_config(twice, export)) as server:
        assert hints(server.url, twice) == []  # SGLang's own choice is 48, and the rest would wait
        assert "takes 50 requests at once" in "".join(hints(server.url, replace(twice, concurrency=51)))
        report = evaluate_beside(server.url, asked.plain_url, asked.prompts, twice, draft=str(export))
        wrong = {"decodes with one": Decoder(server.url, False), "without speculation": Decoder(asked.plain_url, True)}
        for message, decoder in wrong.items():
            with pytest.raises(ServerUnfit, match=message):
                asyncio.run(measure([decoder], asked.prompts[:1], twice))
    assert (len(report.rates), len(report.speedups)) == (2, 2)
    assert report.equal_answers == len(asked.prompts)
    new = report.by_category["new"]
    assert new.verifications < new.tokens - len(asked.heldout)  # the draft is of use on what it never saw
    assert new.acceptance_length == pytest.approx(trained.heldout.acceptance_length, rel=0.1)
