"""The loop: learns, resumes bit-exactly, survives bad data and signals, and says what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from eagle3_data.builders.samples.spec import SampleSpec
from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import ConfigError, TrainingError
from eagle3_data.manifest import Manifest
from eagle3_data.protocol import AUX, LAST
from eagle3_data.shards import ShardSet
from eagle3_data.train.checkpoint import DRAFT, OPTIMIZER, TrainState, checkpoints, read_draft
from eagle3_data.train.config import load_config
from eagle3_data.train.export import export_draft
from eagle3_data.train.loader import BufferPool, Collator, LoadedStep
from eagle3_data.train.plan import Cursor
from eagle3_data.train.progress import Meter
from eagle3_data.train.trainer import Trainer, TrainReport, _Agreed
from tests.builds import make_build
from tests.train.conftest import MakeConfig
from tests.train.fakes import MemorySamples, random_samples

LENGTHS = [20, 40, 60, 33, 12, 64, 50, 28] * 3


@pytest.fixture
def data() -> MemorySamples:
    return random_samples(LENGTHS, width=64, vocab=768, layers=(1, 3, 4))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / DRAFT) | load_file(folder / OPTIMIZER)


def log_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_loss_falls(make_config: MakeConfig, sharp_target: Path, data: MemorySamples) -> None:
    data.samples = [data.samples[2]] * len(data.samples)  # the same batch again and again
    data.tokens[:] = data.tokens[2]
    state = Trainer(make_config("optim.epochs=2", "draft.vocab_size=null", target=sharp_target), data).run().state
    assert state.first_loss is not None
    assert state.last_loss is not None
    assert state.last_loss < 0.9 * state.first_loss


def test_the_run_folder_tells_the_story(make_config: MakeConfig, data: MemorySamples) -> None:
    config = make_config("optim.epochs=4", "run.eval_every_steps=10", "run.keep_checkpoints=1")
    report = Trainer(config, data).run()
    state = report.state
    assert report.stopped == "finished"
    assert state.epoch == 4
    assert checkpoints(config.run.output) == [report.checkpoint]
    assert load_config(config.run.output / "config.yaml") == config
    assert report.heldout is not None
    assert {"train/loss", "train/accuracy_2", "train/tokens_per_s"} <= set(log_of(config.run.output)[0])
    assert state.tokens == sum(int(n) for i, n in enumerate(data.tokens) if i not in held_out(config, data)) * 4
    saved = read_draft(config.run.output)
    assert saved.folder.name == "best"
    assert saved.spec.trained_tokens == 64
    assert saved.tensors["t2d"].sum() == 256


def held_out(config: object, data: MemorySamples) -> set[int]:
    from eagle3_data.train.plan import split_samples

    split = split_samples(data.keys, data.tokens, config.data, seed=0)  # type: ignore[attr-defined]
    return set(split.holdout.tolist())


def test_resume_is_bit_exact(make_config: MakeConfig, data: MemorySamples, tmp_path: Path) -> None:
    """Stopped in epoch 0 and again in epoch 1, the run ends at the same bits as one that was never stopped."""
    whole = Trainer(make_config("optim.epochs=2", output=tmp_path / "whole"), data).run()
    stopped = make_config("optim.epochs=2", "run.checkpoint_every_steps=3", output=tmp_path / "stopped")
    for at in (3, whole.state.step - 2):
        interrupted = stop_at(Trainer(stopped, data), at)
        assert (interrupted.stopped, interrupted.state.step) == ("interrupted", at)
    finished = Trainer(stopped, data).run()
    assert finished.state.step == whole.state.step
    ours, theirs = weights(finished.checkpoint), weights(whole.checkpoint)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert finished.state.tokens == whole.state.tokens


def stop_at(trainer: Trainer, step: int) -> TrainReport:
    """Run until `step` optimizer steps are made, then ask for a stop as a signal would."""
    make = trainer._step

    def counted(*args: object) -> object:
        result = make(*args)  # type: ignore[arg-type]
        if trainer.state.step + 1 == step:
            trainer.signal.asked = True
        return result

    trainer._step = counted  # type: ignore[assignment, method-assign]
    return trainer.run()


def test_sigterm_saves_and_stops(make_config: MakeConfig, data: MemorySamples) -> None:
    config = make_config("optim.epochs=500")
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    report = Trainer(config, data).run()
    assert report.stopped == "interrupted"
    assert 0 < report.state.step < 500 * 10
    assert checkpoints(config.run.output) == [report.checkpoint]


def test_a_killed_save_leaves_no_checkpoint_that_counts(make_config: MakeConfig, data: MemorySamples) -> None:
    config = make_config()
    folder = config.run.output / "checkpoints" / ".step-00000009.tmp"
    folder.mkdir(parents=True)
    (folder / DRAFT).write_bytes(b"half")
    assert checkpoints(config.run.output) == []
    assert Trainer(config, data).run().stopped == "finished"


def test_time_limit_stops_and_anneals(make_config: MakeConfig, data: MemorySamples) -> None:
    config = make_config("optim.epochs=100000", "optim.max_minutes=0.04", "run.log_every_s=0")
    report = Trainer(config, data).run()
    assert report.stopped == "time"
    rates = [line["train/lr"] for line in log_of(config.run.output) if "train/lr" in line]
    assert rates[-1] < 0.5 * max(rates)


def test_steps_with_a_non_finite_gradient_are_skipped_and_counted(make_config: MakeConfig, data: MemorySamples) -> None:
    config = make_config("optim.epochs=1", "batch.batches_per_step=1", "data.holdout_share=0.0")
    data.samples[4][LAST][:] = float("nan")
    report = Trainer(config, data).run()
    assert report.state.skipped_steps == 1
    assert all(torch.isfinite(tensor).all() for tensor in weights(report.checkpoint).values())


def test_too_many_bad_steps_stop_the_run(make_config: MakeConfig, data: MemorySamples) -> None:
    for sample in data.samples:
        sample[LAST][:] = float("nan")
    with pytest.raises(TrainingError, match="3 steps in a row"):
        Trainer(make_config("run.max_skipped_steps=2"), data).run()


@pytest.mark.parametrize("where", ["training", "held out"])
def test_what_cannot_be_read_ends_the_run_with_its_own_error(
    make_config: MakeConfig, data: MemorySamples, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a step that was short of a sample is not saved."""
    config = make_config("run.checkpoint_every_steps=1", "batch.batches_per_step=3", "optim.epochs=1")
    plan = Trainer(config, data).plan
    heldout = plan.split.holdout.tolist()
    second = next(iter(list(plan.steps(Cursor(), rank=0, world=1, epochs=1))[1:])).batches[1]
    assert second is not None
    bad = heldout[0] if where == "held out" else second.samples[0]
    read = MemorySamples.read

    def broken(self: MemorySamples, i: int, columns: tuple[str, ...]) -> dict[str, torch.Tensor]:
        if i == bad and AUX in columns:
            raise OSError("disk is gone")
        return read(self, i, columns)

    monkeypatch.setattr(MemorySamples, "read", broken)
    with pytest.raises(OSError, match="disk is gone"):
        Trainer(config, data).run()
    saved = [int(folder.name.removeprefix("step-")) for folder in checkpoints(config.run.output)]
    assert saved == ([1] if where == "training" else saved)
    assert not (config.run.output / "best").exists()


def test_early_stop(make_config: MakeConfig, data: MemorySamples) -> None:
    """The target is noise: the acceptance length does not get better for long."""
    config = make_config("optim.epochs=200", "run.eval_every_steps=1", "run.early_stop_evals=3")
    report = Trainer(config, data).run()
    assert report.stopped == "early_stop"
    assert report.state.evals_without_better == 3
    again = Trainer(config, data).run()
    assert (again.stopped, again.state.step) == ("early_stop", report.state.step), "the same command trains no further"
    longer = make_config("optim.epochs=200", "run.eval_every_steps=1", "run.early_stop_evals=4")
    assert Trainer(longer, data).run().state.step > report.state.step


def test_resume_on_other_data_or_draft_is_refused(make_config: MakeConfig, data: MemorySamples) -> None:
    Trainer(make_config("optim.epochs=1"), data).run()
    with pytest.raises(ConfigError, match="other data, batches or seed"):
        Trainer(make_config("optim.seed=5"), data)
    with pytest.raises(ConfigError, match="draft's intermediate_size is 128"):
        Trainer(make_config("draft.intermediate_size=96"), data)
    with pytest.raises(ConfigError, match="already holds checkpoints"):
        Trainer(make_config("run.resume=false"), data)


def test_warm_start_keeps_weights_and_vocabulary(make_config: MakeConfig, data: MemorySamples, tmp_path: Path) -> None:
    first = Trainer(make_config("optim.epochs=1", output=tmp_path / "first"), data).run()
    saved = load_file(first.checkpoint / DRAFT)
    other = random_samples(LENGTHS, width=64, vocab=768, layers=(1, 3, 4), seed=9)
    config = make_config(f"draft.init_from={first.checkpoint}", output=tmp_path / "second")
    trainer = Trainer(config, other)
    for name, parameter in trainer.core.draft.named_parameters():
        assert torch.equal(parameter.detach(), saved[name]), name
    assert torch.equal(trainer.keeper._maps["d2t"], saved["d2t"])
    assert trainer.keeper._maps["d2t"].tolist() != make_anew(make_config, other, tmp_path / "anew").tolist()
    with pytest.raises(ConfigError, match="draft vocabulary of 256"):
        Trainer(
            make_config(f"draft.init_from={first.checkpoint}", "draft.vocab_size=128", output=tmp_path / "x"), other
        )


def make_anew(make_config: MakeConfig, data: MemorySamples, output: Path) -> torch.Tensor:
    d2t: torch.Tensor = Trainer(make_config(output=output), data).keeper._maps["d2t"]
    return d2t


def test_warm_start_takes_the_datas_vocabulary_when_told(
    make_config: MakeConfig, data: MemorySamples, tmp_path: Path
) -> None:
    first = Trainer(make_config("optim.epochs=1", output=tmp_path / "first"), data).run()
    saved = load_file(first.checkpoint / DRAFT)
    other = random_samples(LENGTHS, width=64, vocab=768, layers=(1, 3, 4), seed=9)
    told = (f"draft.init_from={first.checkpoint}", "draft.init_vocab=data", "draft.vocab_size=128")
    trainer = Trainer(make_config(*told, output=tmp_path / "second"), other)
    maps, draft = trainer.keeper._maps, trainer.core.draft
    assert maps["d2t"].shape == (128,)
    assert torch.equal(draft.fc.weight.detach(), saved["fc.weight"])
    kept = (torch.arange(128) + maps["d2t"]).tolist()
    before = (torch.arange(256) + saved["d2t"]).tolist()
    common = sorted(set(kept) & set(before))
    assert 0 < len(common) < 128
    ours, theirs = draft.lm_head.weight.detach(), saved["lm_head.weight"]
    for token in common:
        assert torch.equal(ours[kept.index(token)], theirs[before.index(token)])


@pytest.mark.parametrize("shape", [(), ("draft.sliding_window_tokens=16",)])  # a config.json does not say the second
def test_warm_start_from_either_engines_export(
    make_config: MakeConfig, data: MemorySamples, tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: tuple[str]
) -> None:
    first = Trainer(make_config("optim.epochs=1", *shape, output=tmp_path / "first"), data).run()
    assert "latin: " in capsys.readouterr().out  # the vocabulary's coverage by writing system
    saved = load_file(first.checkpoint / DRAFT)
    for engine in ("sglang", "vllm"):
        out = export_draft(first.checkpoint, tmp_path / engine, engine=engine, dtype="float32").folder  # type: ignore[arg-type]
        trainer = Trainer(make_config(f"draft.init_from={out}", *shape, output=tmp_path / f"from-{engine}"), data)
        for name, parameter in trainer.core.draft.named_parameters():
            assert torch.equal(parameter.detach(), saved[name]), name


def test_no_pickle_anywhere(make_config: MakeConfig, data: MemorySamples) -> None:
    report = Trainer(make_config("optim.epochs=1"), data).run()
    names = {path.name for path in report.output.rglob("*") if path.is_file()}
    assert all(name.endswith((".safetensors", ".json", ".jsonl", ".yaml")) for name in names), names


def test_state_refuses_unknown_fields() -> None:
    with pytest.raises(ValueError, match="unknown field"):
        TrainState.from_json('{"steps": 3}')


def test_the_rows_are_those_that_the_data_says_unless_told(
    make_config: MakeConfig, data: MemorySamples, tmp_path: Path
) -> None:
    """One default for makers and trainers; what a maker chose travels in the manifest."""
    make_build(tmp_path / "build", lengths=LENGTHS)
    manifest = Manifest.load(tmp_path / "build")
    assert ShardSet.open(tmp_path / "build").alignment == SampleSpec().alignment == "strict"
    manifest.model_copy(update={"samples": SampleSpec(alignment="legacy").to_dict()}).save(tmp_path / "build")
    stored = ShardSet.open(tmp_path / "build")
    assert stored.alignment == "legacy"
    data.alignment = stored.alignment
    rows = {}
    for told in ("null", "strict"):
        output = tmp_path / told
        Trainer(make_config(f"ttt.alignment={told}", "optim.epochs=1", "run.log_every_s=0", output=output), data).run()
        rows[told] = sum(line.get("train/rows_2", 0) for line in log_of(output))
    assert rows["strict"] < rows["null"]  # legacy also trains late steps that begin before the answer
    manifest.model_copy(update={"samples": {"alignment": "eagle"}}).save(tmp_path / "build")
    with pytest.raises(ConfigError, match="alignment 'eagle'"):
        _ = ShardSet.open(tmp_path / "build").alignment


def test_bf16_keeps_float32_master_weights(make_config: MakeConfig, data: MemorySamples, tmp_path: Path) -> None:
    wide = Trainer(make_config("optim.epochs=1", output=tmp_path / "fp32"), data).run()
    AcceleratorState._reset_state()  # the precision belongs to the process
    report = Trainer(make_config("optim.epochs=1", "run.precision=bf16", output=tmp_path / "bf16"), data).run()
    AcceleratorState._reset_state()
    assert {tensor.dtype for name, tensor in weights(report.checkpoint).items() if name not in ("d2t", "t2d")} == {
        torch.float32
    }
    assert report.state.last_loss == pytest.approx(wide.state.last_loss, rel=0.03)
    assert report.state.last_loss != wide.state.last_loss


def test_a_resume_with_more_batches_a_step_goes_on_where_the_rate_was(
    make_config: MakeConfig, data: MemorySamples
) -> None:
    """Steps were compared with the new number of all steps: the rate was 0 for the rest of the run."""
    short = ("optim.epochs=4", "optim.schedule=linear", "optim.warmup_share=0.0", "optim.final_lr_share=0.0")
    trainer = Trainer(make_config(*short, "batch.batches_per_step=1", "run.log_every_s=0.0"), data)
    total = trainer.total_steps
    stopped = stop_at(trainer, total // 2)
    again = make_config(*short, "batch.batches_per_step=4", "run.log_every_s=0.0")
    finished = Trainer(again, data).run()
    assert finished.stopped == "finished"
    assert finished.state.step < total
    rates = {line["step"]: line["train/lr"] for line in log_of(again.run.output) if "train/lr" in line}
    after = [rate for step, rate in rates.items() if step > stopped.state.step]
    assert rates[stopped.state.step] > after[0] > 0.3 * again.optim.lr
    assert after == sorted(after, reverse=True)
    assert 0 < after[-1] < after[0] / 3


class OneOf:
    """What the trainer needs of an accelerator, as one rank of several; keeps the gradient that DDP would average."""

    def __init__(self, ranks: int) -> None:
        self.num_processes, self.gradient = ranks, torch.zeros(())

    def no_sync(self, _model: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_grad_norm_(self, parameters: list[torch.nn.Parameter], _norm: float) -> torch.Tensor:
        self.gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        return self.gradient.norm()


@pytest.mark.parametrize("denominator", ["tokens", "valid", "batch"])
def test_a_gradient_is_the_same_at_any_number_of_ranks(make_config: MakeConfig, denominator: str) -> None:
    """5 micro-batches on 1, 2, 3 and 8 ranks, of which some have one less or none."""
    data = random_samples([60] * 20, width=64, vocab=768, layers=(1, 3, 4))
    config = make_config(f"loss.denominator={denominator}", "batch.batches_per_step=5", "data.holdout_share=0.0")
    trainer = Trainer(config, data)
    trainer.optimizer.step = lambda: None  # type: ignore[method-assign, assignment, misc]
    step = next(trainer.plan.steps(Cursor(), rank=0, world=1, epochs=1))
    collator = Collator(data, max_sample_tokens=128, steps=3, alignment="strict", reader_threads=1)
    counts = sum((collator.count_rows(m) for m in step.batches if m is not None), torch.zeros(3, dtype=torch.int64))

    def gradient(world: int) -> torch.Tensor:
        total = torch.zeros(())
        for rank in range(world):
            mine = next(trainer.plan.steps(Cursor(), rank=rank, world=world, epochs=1))
            pool = BufferPool(data.capture, positions=trainer.plan.largest_batch(), count=8, pinned=False)
            buffers = [pool.take() for _ in mine.batches]
            hosts = [m and b and collator.collate(m, b) for m, b in zip(mine.batches, buffers, strict=True)]
            trainer.accelerator = one = OneOf(world)  # type: ignore[assignment]
            trainer._step(LoadedStep(mine, counts), iter(hosts), pool, _Agreed(counts.double(), False, False, 0.0))
            total = total + one.gradient
        return total / world

    alone = gradient(1)
    for world in (2, 3, 8):
        assert torch.allclose(gradient(world), alone, rtol=1e-4, atol=1e-7), world


def test_an_evaluation_is_no_training_time(
    make_config: MakeConfig, data: MemorySamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out: list[float] = []
    monkeypatch.setattr(Meter, "leave_out", lambda _self, seconds: left_out.append(seconds))
    real = Trainer._evaluate
    monkeypatch.setattr(Trainer, "_evaluate", lambda self: (time.sleep(0.2), real(self))[1])
    Trainer(make_config("optim.epochs=1", "run.eval_every_steps=2"), data).run()
    assert [seconds >= 0.2 for seconds in left_out] == [step % 2 == 1 for step in range(len(left_out))]
    meter = Meter(make_config(), torch.device("cpu"))
    assert not meter.due()


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (("draft.fc_norm=true",), (), "fc_norm is True, this configuration's is False"),
        (("draft.norm_output=true",), (), "norm_output is True"),
        ((), ("draft.sliding_window_tokens=16",), "sliding_window_tokens is None"),
        ((), ("draft.num_attention_heads=8", "draft.head_dim=8"), "num_attention_heads is 4"),
    ],
)
def test_a_warm_start_that_would_compute_something_else_is_refused(
    make_config: MakeConfig, data: MemorySamples, tmp_path: Path, first: tuple[str], second: tuple[str], what: str
) -> None:
    before = Trainer(make_config("optim.epochs=1", *first, output=tmp_path / "first"), data).run()
    export = export_draft(before.checkpoint, tmp_path / "export", engine="sglang", dtype="float32").folder
    for source in (before.checkpoint, before.output, export):
        with pytest.raises(ConfigError, match=what) as caught:
            Trainer(make_config(f"draft.init_from={source}", *second, output=tmp_path / "second"), data)
        assert "set draft." in str(caught.value.next)
    other = random_samples(LENGTHS, width=64, vocab=768, layers=(0, 2, 4))
    with pytest.raises(ConfigError, match=r"outputs of layers \[1, 3, 4\], the data has \[0, 2, 4\]"):
        Trainer(make_config(f"draft.init_from={export}", *first, output=tmp_path / "second"), other)


def test_a_warm_start_keeps_the_drafts_rotary_base(
    make_config: MakeConfig, data: MemorySamples, sharp_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No setting names it, and the target's may be another: the draft goes on as it was trained."""
    before = Trainer(make_config("optim.epochs=1", output=tmp_path / "first"), data).run()
    target = tmp_path / "target"
    shutil.copytree(sharp_target, target)
    config = json.loads((target / "config.json").read_text())
    config.get("rope_parameters", config)["rope_theta"] = 5.0
    (target / "config.json").write_text(json.dumps(config))
    own = read_draft(before.checkpoint).spec.rope
    warm = make_config(f"draft.init_from={before.checkpoint}", target=target, output=tmp_path / "second")
    trainer = Trainer(warm, data)
    assert trainer.core.draft.spec.rope == own
    assert "rope is the draft's own" in capsys.readouterr().out
    assert Trainer(make_config(target=target, output=tmp_path / "third"), data).core.draft.spec.rope.theta == 5.0


def test_a_run_goes_on_when_the_draft_that_it_began_with_is_gone(
    make_config: MakeConfig, data: MemorySamples, tmp_path: Path
) -> None:
    before = Trainer(make_config("optim.epochs=1", output=tmp_path / "first"), data).run()
    config = make_config(f"draft.init_from={before.output}", "optim.epochs=2", output=tmp_path / "second")
    stopped = stop_at(Trainer(config, data), 2)
    shutil.rmtree(before.output)
    finished = Trainer(config, data).run()
    assert finished.state.step > stopped.state.step
    with pytest.raises(ConfigError, match="neither a run folder"):
        Trainer(make_config(f"draft.init_from={before.output}", output=tmp_path / "third"), data)


def test_a_run_without_a_step_has_a_report(
    make_config: MakeConfig, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C or a spent time limit before the first step."""
    from eagle3_data.cli.train import _train

    spec = CaptureSpec(model=str(tiny_llama), layers=(1, 3, 4), width=64, vocab_size=768)
    make_build(tmp_path / "build", LENGTHS, spec=spec)
    _train(make_config(f"data.folder={tmp_path / 'build'}", "optim.max_minutes=1e-12"), ())
    said = capsys.readouterr().out
    assert "time after 0 steps" in said
    assert "loss  " not in said.partition("time after")[2]
