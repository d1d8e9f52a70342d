"""Ready settings by the name of a data set; paths are filled in by the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3_data.errors import ConfigError
from eagle3_data.train.config import TrainConfig, parse_config

EAGLE31 = {"fc_norm": True, "norm_output": True}
"""EAGLE-3.1's two norms, which SGLang 0.5.14 and newer load; see docs/training.md for what they are worth."""

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # two CPU cores, two minutes, some 50 thousand tokens: many small steps, no more draft steps than are served
    "smollm2_demo": {
        "data": {"max_sample_tokens": 384, "holdout_share": 0.15},
        "draft": {"vocab_size": 8192, **EAGLE31},
        "ttt": {"steps": 3},
        "batch": {"micro_batch_tokens": 384, "batches_per_step": 1},
        "optim": {"lr": 1e-3, "epochs": 100, "max_minutes": 2.0, "warmup_share": 0.05},
        "run": {"precision": "fp32", "eval_every_steps": 200, "checkpoint_every_steps": 200, "log_every_s": 5.0},
    },
    # Kimi-K2.5 (61 layers, width 7168, 163,840 tokens): 8 or more GPUs, long samples in packed rows
    "kimi_k25_synth": {
        "data": {"max_sample_tokens": 8192, "holdout_share": 0.01, "holdout_max_samples": 256},
        "draft": {"vocab_size": 32000, **EAGLE31},
        "batch": {"micro_batch_tokens": 8192, "batches_per_step": 16, "packing": True, "pad_multiple": 128},
        "optim": {"lr": 5e-5, "epochs": 3, "clip_norm": 1.0},
        "run": {"precision": "bf16", "checkpoint_every_steps": 500, "eval_every_steps": 500},
    },
}


def preset_values(name: str, *, folder: Path, output: Path) -> dict[str, Any]:
    """Sections of preset `name` with the data folder and the run folder put in."""
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; known: {', '.join(sorted(PRESETS))}")
    values: dict[str, Any] = {section: dict(fields) for section, fields in PRESETS[name].items()}
    values.setdefault("data", {})["folder"] = str(folder)
    values.setdefault("run", {})["output"] = str(output)
    return values


def preset(name: str, *, folder: Path, output: Path) -> TrainConfig:
    return parse_config(preset_values(name, folder=folder, output=output), source=f"preset {name}")
