"""A tiny target whose next tokens are far apart, so that a tiny draft can learn them, and a run's configuration."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_data.train.config import TrainConfig, override, parse_config


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sharp_target(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with its head scaled up: the same states, confident answers."""
    folder = tmp_path_factory.mktemp("target") / "sharp-llama"
    shutil.copytree(tiny_llama, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 8
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


MakeConfig = Callable[..., TrainConfig]


@pytest.fixture
def make_config(tmp_path: Path, tiny_llama: Path) -> MakeConfig:
    """`make_config("optim.epochs=3", target=...)`: a small quick run in tmp_path/run."""

    def make(*assignments: str, target: Path | None = None, output: Path | None = None) -> TrainConfig:
        values: dict[str, dict[str, Any]] = {
            "data": {"folder": "unused", "max_sample_tokens": 128, "holdout_share": 0.1},
            "target": {"model": str(target or tiny_llama)},
            "draft": {"vocab_size": 256},
            "ttt": {"steps": 3},
            "batch": {"micro_batch_tokens": 128, "batches_per_step": 2, "prefetch_batches": 2},
            "optim": {"lr": 1e-3, "epochs": 2},
            "run": {
                "output": str(output or tmp_path / "run"),
                "log_every_s": 1000,
                "trackers": [],
                "precision": "fp32",
            },
        }
        return parse_config(override(values, list(assignments)), source="test")

    return make
