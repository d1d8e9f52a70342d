"""Settings: every field documented, unknown ones refused, YAML that reads back, and the command line around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_data.cli import train as cli
from eagle3_data.errors import ConfigError
from eagle3_data.train.config import TrainConfig, load_config, override, parse_config, to_yaml
from eagle3_data.train.presets import PRESETS, preset
from tests.builds import make_build
from tests.train.conftest import MakeConfig


def test_yaml_reads_back_and_documents_every_field(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config("optim.max_minutes=1.5", "draft.vocab_size=null", "run.trackers=[tensorboard, wandb]")
    text = to_yaml(config)
    (tmp_path / "c.yaml").write_text(text)
    assert load_config(tmp_path / "c.yaml") == config
    for section in TrainConfig.model_fields:
        for name, info in type(getattr(config, section)).model_fields.items():
            assert info.description, f"{section}.{name} has no documentation"
            assert f"  {name}: " in text


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_valid(name: str, tmp_path: Path) -> None:
    config = preset(name, folder=tmp_path, output=tmp_path)
    assert config.data.folder == tmp_path
    with pytest.raises(ConfigError, match="known: kimi_k25_synth, smollm2_demo"):
        preset("kimi", folder=tmp_path, output=tmp_path)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optim.lrr=1", r"optim\.lrr.*got 1"),
        ("optim.lr=-1", r"optim\.lr.*greater than 0"),
        ("ttt.alignment=eagle", r"ttt\.alignment.*got 'eagle'"),
        ("data.max_sample_tokens=999", r"max_sample_tokens \(999\) must not exceed"),
        ("run.simulate_draft_tokens=9", r"simulate_draft_tokens \(9\)"),
        ("lr=3", "section.field=value"),
        ("nonsense.x=3", "nonsense"),
    ],
)
def test_wrong_settings_name_field_and_value(make_config: MakeConfig, assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(assignment)
    assert override({"a": {"b": 1}}, ["a.c=[1, 2]"]) == {"a": {"b": 1, "c": [1, 2]}}


def test_options_win_over_file_over_preset(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("optim:\n  lr: 0.002\n  epochs: 7\n")
    config = cli.gather(
        config=file,
        preset="smollm2_demo",
        data=tmp_path / "d",
        out=tmp_path / "r",
        target="t",
        minutes=3,
        assignments=["optim.lr=0.004"],
    )
    assert (config.optim.lr, config.optim.epochs, config.optim.max_minutes) == (0.004, 7, 3)
    assert (config.draft.vocab_size, config.target.model) == (PRESETS["smollm2_demo"]["draft"]["vocab_size"], "t")
    with pytest.raises(ConfigError, match="--data and --out missing"):
        cli.gather(config=None, preset=None, data=None, out=None, target=None, minutes=None, assignments=[])


def test_module_entry_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["eagle3_data.train", *arguments])
        code = cli.run_module()
        out, err = capsys.readouterr()
        return code, out, err

    code, out, _ = call("--preset", "kimi_k25_synth", "--print-config")
    assert code == 0
    (tmp_path / "c.yaml").write_text(out)
    assert load_config(tmp_path / "c.yaml") == preset("kimi_k25_synth", folder=Path("DATA"), output=Path("RUN"))
    code, _, err = call("--config", str(tmp_path / "none.yaml"))
    assert (code, "cannot read" in err) == (1, True)
    code, out, _ = call("--cache-dir", "/scratch/shards", "--shard-cache-size", "5GB", "--print-config")
    assert code == 0
    (tmp_path / "d.yaml").write_text(out)
    data = load_config(tmp_path / "d.yaml").data
    assert (data.shard_cache, data.shard_cache_size) == (Path("/scratch/shards"), "5GB")
    (tmp_path / "bad.yaml").write_text("- a\n")
    code, _, err = call("--config", str(tmp_path / "bad.yaml"))
    assert (code, "mapping of sections" in err) == (1, True)
    code, _, err = call("--data", str(tmp_path / "no-build"), "--out", str(tmp_path / "run"))
    assert (code, err.startswith("error: ")) == (1, True)
    assert call("--no-such-option")[0] == 2


def test_print_config_states_the_memory_of_reading_ahead_in_bytes(make_config: MakeConfig, tmp_path: Path) -> None:
    make_build(tmp_path / "build")
    settings = make_config(f"data.folder={tmp_path / 'build'}")
    each = (3 * 64 + 64) * 2  # three aux states and the last one, bf16
    assert f" {3 * 128 * each:,} bytes at most ({each:,} per position)" in cli.memory_note(settings)
    assert f"{3 * 128:,} positions at most" in cli.memory_note(make_config())


def test_parse_config_needs_data_and_run() -> None:
    with pytest.raises(ConfigError, match="data"):
        parse_config({"run": {"output": "x"}}, source="s")


@pytest.mark.parametrize(
    "mirror", ["org/name", "hf://datasets/org/name@main", "s3://bucket/some/build", "file:///tmp/some/build"]
)
def test_a_mirror_survives_being_kept_as_a_path(mirror: str) -> None:
    assert cli.mirror_of(Path(mirror)) == mirror
