"""Where a training step's time goes: the trainer on a study's shards under torch's profiler and cProfile.

python benchmarks/gpu/profile_training.py --out RESULT.json --work FOLDER --prompts prompts.jsonl   after end_to_end.py
"""

from __future__ import annotations

import cProfile
import io
import pstats
import shutil

import torch
from study import Study, study_parser


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    study = Study(options, "profile_training")
    for name in ("warm", "profiled"):
        shutil.rmtree(study.work / f"run.{name}", ignore_errors=True)
    warm = study.train(study.work / "data", "run.warm", max_steps=options.steps)
    study.results.add(stage="warm", **warm)
    calls = cProfile.Profile()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        calls.enable()
        again = study.train(study.work / "data", "run.profiled", max_steps=options.steps)
        calls.disable()
    study.results.add(stage="profiled", **again)
    print(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=60))
    text = io.StringIO()
    pstats.Stats(calls, stream=text).sort_stats("tottime").print_stats(35)
    print(text.getvalue())


if __name__ == "__main__":
    main()
