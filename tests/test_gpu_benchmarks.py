"""The GPU benchmarks, as far as no server is needed: tables from results, the held-out tenth, dumps taken."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def pass_of(mode: str, repeat: int, rate: float) -> dict[str, Any]:
    row = {"mode": mode, "repeat": repeat, "tokens": 256, "in_flight": 16, "tokens_per_s": rate, "errors": {}}
    return row | {"latency_p50_s": 1000 / rate, "lag_max_s": 0.25}


def test_the_page_says_what_the_results_say() -> None:
    done = subprocess.run([sys.executable, FOLDER / "tables.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    import tables

    rows = [pass_of("plain", i, rate) for i, rate in enumerate((100.0, 200.0, 400.0))]
    rows += [pass_of("dump", i, rate) for i, rate in enumerate((99.0, 100.0, 396.0))]
    (line,) = [line for line in tables.overhead(rows).splitlines() if "dump" in line]
    assert "| 0.990 |" in line
    assert "| 3 |" in line


def test_what_was_tried_on_a_cpu_is_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tables

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    body = {"benchmark": "overhead", "device": "cpu", "versions": {}, "rows": [pass_of("plain", 0, 1.0)]}
    (tmp_path / "gpu_a.json").write_text(json.dumps(body))
    assert tables.page_part().count("Not measured on a GPU yet.") == len(tables.SECTIONS)
    (tmp_path / "gpu_a.json").write_text(json.dumps({**body, "device": "cuda"}))
    assert tables.page_part().count("Not measured on a GPU yet.") == len(tables.SECTIONS) - 1


def test_the_same_tenth_of_each_source_is_held_out(tmp_path: Path) -> None:
    import study

    rows = [{"id": f"{source}-{i}", "source": source, "prompt": "?"} for source in ("a", "b") for i in range(50)]
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text("".join(json.dumps(row) + "\n" for row in rows))
    second.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    train, heldout = study.split(first)
    assert (train, heldout) == study.split(second)
    assert sorted(row["source"] for row in heldout) == ["a"] * 5 + ["b"] * 5
    assert not {row["id"] for row in train} & {row["id"] for row in heldout}
    assert len(train) + len(heldout) == 100


def test_dumps_and_errors_are_taken_and_counted(tmp_path: Path) -> None:
    from load import Draining

    (tmp_path / "e3d-r-0-0.safetensors").write_bytes(b"12345")
    (tmp_path / "e3d-r-1-0.error.json").write_text(json.dumps({"reason": "pinned_full"}))
    (tmp_path / ".e3d-r-2-0.1-1.tmp").write_bytes(b"1")
    draining = Draining(tmp_path, 2)
    before = time.monotonic()
    taken = draining.result()
    assert (set(taken.came), taken.errors, taken.nbytes) == ({"e3d-r-0-0"}, {"pinned_full": 1}, 5)
    assert abs(taken.came["e3d-r-0-0"] - before) < 60.0, "one clock for both processes"
    assert [path.name for path in tmp_path.iterdir()] == [".e3d-r-2-0.1-1.tmp"]


def test_the_witness_writes_what_layers_and_norm_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import witness
    from safetensors.torch import load_file

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, x if residual is None else residual + x

    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.norm = torch.nn.ModuleList([Layer(), Layer()]), torch.nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            residual = None
            for layer in self.layers:
                x, residual = layer(x, residual)
            return self.norm(x + residual)

    inner = Inner()
    wrapper = SimpleNamespace(language_model=SimpleNamespace(model=inner))
    for name, value in ((witness.FOLDER, str(tmp_path)), (witness.ROWS, "3"), (witness.LAYERS, "0,1")):
        monkeypatch.setenv(name, value)
    witness.watch(None, SimpleNamespace(model=wrapper))
    inner(torch.ones(2, 4))  # fewer rows than asked for: a decode, a warm-up
    x = torch.arange(12.0).view(3, 4)
    last = inner(x)
    (path,) = tmp_path.iterdir()
    found = load_file(path)
    assert sorted(found) == ["layer.0", "layer.1", "norm"]
    assert found["layer.0"].equal(3 * x)
    assert found["layer.1"].equal(4 * x + x + 2 * x)
    assert found["norm"].equal(last)


@pytest.mark.parametrize("shape", ["tiny", "2k"])
def test_the_ranks_benchmark_has_settings_that_training_takes_and_data_that_it_reads(
    tmp_path: Path, shape: str
) -> None:
    import ranks

    from eagle3_data.shards import ShardSet
    from eagle3_data.train.config import parse_config

    options = ranks.Options(shape, 40, True, tmp_path)
    config = parse_config(ranks.settings(options, "fsdp2", "bf16"), source="ranks")
    assert config.run.checkpoint_every_steps == 20
    assert config.optim.max_steps == 40
    if shape == "tiny":
        ranks.make_data(tmp_path, ranks.SHAPES[shape], [16, 30, 44, 58] * 12)
        data = ShardSet.open(config.data.folder)
        assert len(data) == ranks.SAMPLES
        assert int(data.tokens.max()) <= config.data.max_sample_tokens


def test_curves_are_compared_in_the_steps_that_both_have() -> None:
    import ranks

    whole = {"losses": {1: 4.0, 2: 2.0, 3: 1.0}, "tokens": {1: 5, 2: 9, 3: 12}}
    rest = {"losses": {2: 2.1, 3: 1.0}, "tokens": {2: 9, 3: 13}}
    found = ranks.compare(rest, whole)
    assert found == {"steps": 2, "max_difference": pytest.approx(0.05), "same_tokens": False}
