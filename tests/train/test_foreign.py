"""Drafts and states of SpecForge and speculators: there and back, and nothing of a hostile file is executed."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file, save_file

from eagle3_data.capture import CaptureSpec
from eagle3_data.cli import main
from eagle3_data.errors import ConfigError, TrainingError
from eagle3_data.manifest import Manifest
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from eagle3_data.shards import ShardSet
from eagle3_data.train.checkpoint import read_draft
from eagle3_data.train.foreign_drafts import import_draft
from eagle3_data.train.foreign_states import export_specforge
from eagle3_data.train.target import read_final_norm, read_target_info
from eagle3_data.verify import verify
from tests.builds import make_build
from tests.train.test_export import checkpoint, config_of

SPEC = CaptureSpec(model="tiny", layers=(1, 3, 4), width=64, vocab_size=768)
LENGTHS = (5, 64, 3, 100, 17, 8, 30)


@pytest.fixture
def target(tiny_llama: Path, tmp_path: Path) -> Path:
    """The tiny Llama with a final norm that is not all ones."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_llama, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.linspace(0.5, 2.0, 64)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["eagle3-data", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code


def equal(ours: ShardSet, theirs: ShardSet, *, last_rtol: float = 0.0) -> None:
    assert len(ours) == len(theirs)
    for i in range(len(theirs)):
        a, b = ours.read(i), theirs.read(i)
        for name in (IDS, MASK, AUX):
            assert torch.equal(a[name], b[name]), (i, name)
        torch.testing.assert_close(a[LAST].float(), b[LAST].float(), rtol=last_rtol, atol=0)


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """States that a final norm could have made: rms(last / weight) = 1, as in every real capture."""
    make_build(tmp_path / "build", lengths=LENGTHS, spec=SPEC)
    return tmp_path / "build"


def test_specforge_states_there_and_back(
    build: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, again = tmp_path / "states", tmp_path / "again"
    command(monkeypatch, "export", build, "--to", "specforge", "--out", states)
    first = torch.load(states / "rows_0-2000" / "data_0.ckpt", weights_only=True)
    assert first["aux_hidden_state"].shape == (1, 5, 192)
    assert first["hidden_state"].shape == (1, 5, 64)
    assert (states / "rows_0-2000" / "data_0.ckpt").stat().st_size < 10_000  # the sample, not its shard
    packed = states / "rows_0-2000" / "data_6.ckpt"  # the last one gzipped, as SpecForge can write them
    (packed.with_name("data_6.ckpt.gz")).write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    arguments = ("import", states, "--target", target, "--out", again, "--layers", "1,3,4", "--shard-size", "40KB")
    command(monkeypatch, *arguments)
    equal(ShardSet.open(again), ShardSet.open(build))
    report = verify(again)
    assert report.ok, report.problems
    manifest = Manifest.load(again)
    assert (manifest.matching, manifest.state, manifest.alignment) == ("imported", "complete", "strict")
    assert len(manifest.shards) > 1
    stamps = {path: path.stat().st_mtime_ns for path in (again / "data").iterdir()}
    command(monkeypatch, *arguments)  # again: nothing is written anew
    assert stamps == {path: path.stat().st_mtime_ns for path in (again / "data").iterdir()}


def test_speculators_states_there_and_back(
    build: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their last state is before the final norm, ours after it."""
    states, again = tmp_path / "states", tmp_path / "again"
    weight = read_final_norm(target, read_target_info(target))
    assert torch.equal(weight, torch.linspace(0.5, 2.0, 64))
    _normalise(build, weight)
    command(monkeypatch, "export", build, "--to", "speculators", "--target", target, "--out", states)
    rows = load_from_disk(str(states))
    one = load_file(states / "hidden_states" / "hs_3.safetensors")
    assert one["hidden_states"].shape == (100, 4, 64)
    assert torch.equal(one["token_ids"], rows[3]["input_ids"])  # what speculators compares
    assert rows[3]["seq_len"] == 100
    command(monkeypatch, "import", states, "--target", target, "--out", again, "--layers", "1,3,4")
    equal(ShardSet.open(again), ShardSet.open(build), last_rtol=0.02)


def _normalise(build: Path, weight: torch.Tensor) -> None:
    """Give the build's last states the form that the target's norm gives: in place, since the mapping is private."""
    shards = ShardSet.open(build)
    for i in range(len(shards)):
        last = shards.read(i)[LAST]
        path = build / "data" / shards.shard_of(i)
        wide = last.float()
        made = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True)) * weight).to(last.dtype)
        data = path.read_bytes()
        raw = last.contiguous().view(torch.uint8).numpy().tobytes()
        path.write_bytes(data.replace(raw, made.contiguous().view(torch.uint8).numpy().tobytes()))


def test_speculators_reads_what_we_export(build: Path, target: Path, tmp_path: Path) -> None:
    data = pytest.importorskip("speculators.train.data", reason="pip install --no-deps speculators hs-connectors")
    from eagle3_data.cli.exchange import export_samples

    export_samples(build, tmp_path / "states", to="speculators", target=str(target))
    theirs = data.ArrowDataset(max_len=4096, datapath=tmp_path / "states", on_missing="raise")
    assert len(theirs) == len(LENGTHS)
    ours = ShardSet.open(build).read(1)
    item = theirs[1]
    assert torch.equal(item["hidden_states"], ours[AUX])
    assert torch.equal(item["input_ids"].int(), ours[IDS])
    assert torch.equal(item["loss_mask"].to(torch.uint8), ours[MASK])


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch exploded",)


def test_bad_and_hostile_files_are_counted_and_never_executed(
    build: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states, again = tmp_path / "states", tmp_path / "again"
    command(monkeypatch, "export", build, "--to", "specforge", "--out", states)
    folder = states / "rows_0-2000"
    monkeypatch.chdir(tmp_path)
    torch.save({"input_ids": Bomb()}, folder / "data_1.ckpt")
    (folder / "data_2.ckpt").write_bytes((folder / "data_2.ckpt").read_bytes()[:700])
    record = torch.load(folder / "data_4.ckpt", weights_only=True)
    record["hidden_state"][0, 3, 3] = float("nan")
    torch.save(record, folder / "data_4.ckpt")
    record = torch.load(folder / "data_5.ckpt", weights_only=True)
    record["aux_hidden_state"] = record["aux_hidden_state"][:, 1:]
    torch.save(record, folder / "data_5.ckpt")
    command(monkeypatch, "import", states, "--target", target, "--out", again, "--layers", "1,3,4")
    assert not (tmp_path / "exploded").exists()
    manifest = Manifest.load(again)
    assert manifest.plan.skipped == {"corrupt": 2, "mismatch": 1}
    assert manifest.failed == {"non_finite": 1}
    assert manifest.saved + 4 == manifest.plan.planned == len(LENGTHS)
    assert "2 corrupt, 1 mismatch, 1 non_finite" in capsys.readouterr().out
    assert json.loads((again / "failures.jsonl").read_text())["id"] == "rows_0-2000/data_4.ckpt"


def test_what_is_neither_form_is_refused(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["eagle3-data", "import", str(tmp_path), "--target", str(target), "--out", "x"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1


DRAFT = {"hidden_size": 64, "vocab_size": 768, "fc_norm": True, "norm_output": True}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_drafts_come_back_from_either_form(
    engine: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path / "c", target_model=str(target), target_layers=8, **DRAFT)
    command(monkeypatch, "export", tmp_path / "c", "--to", engine, "--dtype", "float32", "--out", tmp_path / "theirs")
    command(monkeypatch, "import", tmp_path / "theirs", "--target", target, "--out", tmp_path / "again")
    ours, again = read_draft(tmp_path / "c"), read_draft(tmp_path / "again")
    for name, tensor in ours.tensors.items():
        assert torch.equal(again.tensors[name], tensor), name
    for name in (
        "aux_layers",
        "head_dim",
        "num_key_value_heads",
        "intermediate_size",
        "rope",
        "fc_norm",
        "norm_output",
    ):
        assert getattr(again.spec, name) == getattr(ours.spec, name), name


def test_specforge_training_state(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their `norm_output` is the norm before lm_head, not SGLang's; vocabulary maps are buffers there."""
    checkpoint(tmp_path / "c", target_model=str(target), target_layers=8, hidden_size=64, vocab_size=768)
    command(monkeypatch, "export", tmp_path / "c", "--dtype", "float32", "--out", tmp_path / "export")
    config = config_of(tmp_path / "export")
    del config["eagle_config"]  # then both take EAGLE-3's default layers
    (tmp_path / "draft.json").write_text(json.dumps({**config, "norm_output": True}))
    state = {"draft_state_dict": load_file(tmp_path / "export" / "model.safetensors"), "strategy": "eagle3"}
    (tmp_path / "step").mkdir()
    torch.save(state, tmp_path / "step" / "training_state.pt")
    info = read_target_info(target)
    found = import_draft(tmp_path / "step", tmp_path / "out", target=info, draft_config=tmp_path / "draft.json")
    assert (found.spec.norm_output, found.spec.aux_layers) == (False, (1, 3, 4))
    assert torch.equal(read_draft(tmp_path / "out").tensors["d2t"], state["draft_state_dict"]["d2t"])  # type: ignore[index]
    torch.save({"draft_state_dict": Bomb()}, tmp_path / "step" / "training_state.pt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainingError, match="tensors alone"):
        import_draft(tmp_path / "step", tmp_path / "x", target=info, draft_config=tmp_path / "draft.json")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("field", "value"), [("num_hidden_layers", 2), ("norm_before_residual", True), ("vocab_size", 99)]
)
def test_what_we_would_compute_differently_is_refused(
    field: str, value: object, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path / "c", target_model=str(target), target_layers=8, hidden_size=64, vocab_size=768)
    command(monkeypatch, "export", tmp_path / "c", "--out", tmp_path / "export")
    (tmp_path / "export" / "config.json").write_text(json.dumps({**config_of(tmp_path / "export"), field: value}))
    with pytest.raises(ConfigError, match=field):
        import_draft(tmp_path / "export", tmp_path / "x", target=read_target_info(target))


def test_an_import_replaces_nothing_but_an_imported_draft(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--out drafts` had emptied the folder of all drafts."""
    checkpoint(tmp_path / "c", target_model=str(target), target_layers=8, **DRAFT)
    command(monkeypatch, "export", tmp_path / "c", "--out", tmp_path / "theirs")
    info = read_target_info(target)
    for _ in range(2):
        import_draft(tmp_path / "theirs", tmp_path / "drafts" / "one", target=info)
    with pytest.raises(ConfigError, match="something else than an imported draft"):
        import_draft(tmp_path / "theirs", tmp_path / "drafts", target=info)
    assert read_draft(tmp_path / "drafts" / "one").spec.hidden_size == 64


def test_an_imported_draft_knows_that_its_target_is_quantised(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path / "c", target_model=str(target), target_layers=8, **DRAFT)
    command(monkeypatch, "export", tmp_path / "c", "--out", tmp_path / "theirs")
    assert not import_draft(
        tmp_path / "theirs", tmp_path / "plain", target=read_target_info(target)
    ).spec.target_quantised
    config = json.loads((target / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (target / "config.json").write_text(json.dumps(config))
    assert import_draft(tmp_path / "theirs", tmp_path / "fp8", target=read_target_info(target)).spec.target_quantised


@pytest.mark.parametrize("form", ["specforge", "speculators"])
def test_an_export_of_states_is_of_one_build(
    form: str,
    build: Path,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second build's export had kept the first one's states, beside its own ids."""
    make_build(tmp_path / "other", lengths=LENGTHS[::-1], spec=SPEC)
    arguments = ["--to", form, "--out", tmp_path / "out", "--target", target]
    for _ in range(2):  # the same goes on
        command(monkeypatch, "export", build, *arguments)
    monkeypatch.setattr(sys, "argv", ["eagle3-data", *map(str, ["export", tmp_path / "other", *arguments])])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code
    assert "other data" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        export_specforge(ShardSet.open(build), tmp_path / "mine", on_sample=lambda _done, _all: None)
