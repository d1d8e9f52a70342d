"""Where a training step's time goes: the trainer under torch's profiler and cProfile.

    python benchmarks/gpu/profile_training.py --out RESULT.json --work FOLDER      made-up states, SmolLM2's shape
    python benchmarks/gpu/profile_training.py --out RESULT.json --work FOLDER --data BUILD --target MODEL

Trains twice from the start: once for the rate (the median of the second half of the log lines, one a step), once under
the profilers, whose tables are printed.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from host import Results, steady_rate
from ranks import SHAPES, make_data

from eagle3_data.shards import ShardSet
from eagle3_data.train.config import parse_config
from eagle3_data.train.trainer import Trainer

SMOLLM2 = {"width": 576, "vocab": 49152, "draft_vocab": 16384, "inner": 1536, "heads": 9, "kv_heads": 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="a build; made up where not given")
    parser.add_argument("--target", type=Path, help="its target")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--samples", type=int, default=600, help="of made-up data")
    parser.add_argument("--rows", type=int, default=40, help="of the profilers' tables")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    shape = SMOLLM2 if gpu else SHAPES["tiny"]
    results = Results(options.out, "profile_training", {"steps": options.steps}, "cuda" if gpu else "cpu")
    if options.data is None:
        options.data, options.target = options.work / "made" / "data", options.work / "made" / "target"
        if not options.data.exists():
            lengths = random.Random(0)
            make_data(options.work / "made", shape, [lengths.randint(80, 460) for _ in range(options.samples)])
    results.add(stage="warm", **train(options, shape, gpu))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    calls = cProfile.Profile()
    with torch.profiler.profile(activities=activities if gpu else activities[:1]) as seen:
        calls.enable()
        results.add(stage="profiled", **train(options, shape, gpu))
        calls.disable()
    order = "self_cuda_time_total" if gpu else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=order, row_limit=options.rows, max_name_column_width=70))
    text = io.StringIO()
    pstats.Stats(calls, stream=text).sort_stats("tottime").print_stats(options.rows)
    print(text.getvalue())


def train(options: argparse.Namespace, shape: dict[str, int], gpu: bool) -> dict[str, Any]:
    folder = options.work / "profile"
    shutil.rmtree(folder, ignore_errors=True)
    values = {
        "data": {"folder": str(options.data), "max_sample_tokens": 1024, "holdout_max_samples": 32},
        "target": {"model": str(options.target)},
        "draft": {"vocab_size": shape["draft_vocab"], "fc_norm": True},
        "ttt": {"steps": 7},
        "batch": {"micro_batch_tokens": options.batch_tokens, "batches_per_step": 1, "packing": True}
        | {"pad_multiple": 128},
        "optim": {"lr": 1e-3, "epochs": 100, "max_steps": options.steps},
        "run": {"output": str(folder), "precision": "bf16" if gpu else "fp32", "log_every_s": 0.0, "trackers": []},
    }
    shards = ShardSet.open(options.data)
    began = time.monotonic()
    report = Trainer(parse_config(values, source="profile"), shards).run()
    seconds = time.monotonic() - began
    return {
        "steps": report.state.step,
        "seconds": seconds,
        "tokens_per_s": steady_rate(folder),
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else 0,
    }


if __name__ == "__main__":
    main()
