"""What TensorBoard and W&B are told of a run, read back from their own files."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from eagle3_data.errors import ConfigError
from eagle3_data.train import tracking
from eagle3_data.train.trainer import Trainer
from tests.train.conftest import MakeConfig
from tests.train.fakes import MemorySamples, random_samples

BLOCK, CHUNK, WHOLE, LAST = 32768, struct.Struct("<IHB"), 1, 4
"""LevelDB's log: blocks of chunks, each with checksum, length and kind; the file begins with seven bytes of W&B's."""
LENGTHS = [20, 40, 33, 12, 50, 28] * 2


@pytest.fixture
def data() -> MemorySamples:
    return random_samples(LENGTHS, width=64, vocab=768, layers=(1, 3, 4))


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Any:
    yield
    AcceleratorState._reset_state()
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # else the next test goes on with this one's mode


def test_tensorboard_has_metrics_and_config(make_config: MakeConfig, data: MemorySamples) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = Trainer(make_config("optim.epochs=1", "run.trackers=[tensorboard]"), data).run()
    scalars: dict[str, list[int]] = {}
    config = ""
    for path in report.output.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path.parent))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            scalars.setdefault(tag, []).extend(event.step for event in events.Scalars(tag))
    assert report.state.step in scalars["train/loss"]
    assert scalars["eval/acceptance_length"] == [report.state.step]
    for path in report.output.rglob("hparams.yml"):
        config += path.read_text()
    assert "optim.lr: 0.001" in config


def wandb_records(folder: Path) -> list[Any]:
    """The records of the one offline run in a run folder, which W&B would send: a LevelDB log of protobuf messages."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # finish is only announced to W&B's process, which then writes the file; this waits for it
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, records, message = path.read_bytes(), 7, [], b""
    while at < len(data):
        rest = BLOCK - at % BLOCK
        if rest < CHUNK.size:
            at += rest
            continue
        _, length, kind = CHUNK.unpack_from(data, at)
        message += data[at + CHUNK.size : at + CHUNK.size + length]
        at += CHUNK.size + length
        if kind in (WHOLE, LAST):
            records.append(wandb_internal_pb2.Record.FromString(message))
            message = b""
    return records


def test_wandb_offline_has_metrics_config_and_name(
    make_config: MakeConfig, data: MemorySamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("WANDB_ERROR_REPORTING", "false")):
        monkeypatch.setenv(name, value)
    config = make_config("optim.epochs=1", "run.trackers=[wandb]", "run.log_every_s=0", output=tmp_path / "kimi-draft")
    report = Trainer(config, data).run()
    records = wandb_records(report.output)
    (run, *_) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.display_name, run.project) == ("kimi-draft", "eagle3")
    settings = {item.key: item.value_json for record in records for item in record.run.config.update}
    settings |= {item.key: item.value_json for record in records for item in record.config.update}
    assert settings["optim.lr"] == "0.001"
    rows = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    losses = {int(row["_step"]): float(row["train/loss"]) for row in rows if "train/loss" in row}
    assert losses[report.state.step] == pytest.approx(report.state.last_loss)
    assert any("eval/acceptance_length" in row for row in rows)


def test_wandb_without_a_login_says_what_to_do(
    make_config: MakeConfig, data: MemorySamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody is asked
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    trainer = Trainer(make_config("optim.epochs=1", "run.trackers=[wandb]"), data)
    with pytest.raises(ConfigError, match="WANDB_MODE=offline"):
        trainer.run()


def test_a_tracker_that_is_asked_for_and_missing_is_an_error(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'eagle3-data\[wandb\]'"):
        tracking.chosen_trackers(make_config("run.trackers=[wandb]"))
    assert tracking.chosen_trackers(make_config("run.trackers=null")) == []
    assert tracking.chosen_trackers(make_config("run.trackers=[]")) == []
