"""The same training on bf16, fp8 and top-k data: what an encoding costs in acceptance length.

    python benchmarks/gpu/encodings.py --out RESULT.json --work FOLDER --prompts prompts.jsonl    after end_to_end.py

Builds each encoding from the same answers (the greedy ones), trains the same steps in the same order on each, and
evaluates each draft in the real server.
"""

from __future__ import annotations

from typing import Any

from study import Study, study_parser

from eagle3_data.builders.build import build
from eagle3_data.builders.pool import FlowConfig
from eagle3_data.builders.settings import BuildConfig

ENCODINGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"encoding": "fp8"},
    "topk64": {"last": "topk:64"},
    "fp8-topk64": {"encoding": "fp8", "last": "topk:64"},
}


def capture(study: Study, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with study.capturing() as server:
        for name in names:
            config = BuildConfig(
                out=study.work / f"data.{name}",
                inputs=(str(study.work / "answers.0.jsonl"),),
                model=str(study.model),
                servers=(server.url,),
                flow=FlowConfig(max_inflight=study.options.in_flight),
                head_device="cpu" if study.host.cpu else "cuda",
                **ENCODINGS[name],
            )
            report = build(config, on_tick=lambda _tick: None, on_text=print)
            found[name] = {
                "saved": report.saved,
                "failed": report.failed,
                "tokens_per_s": report.tokens_per_s,
                "bytes_per_token": report.nbytes / max(report.tokens, 1),
            }
    return found


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--encodings", default="bf16,fp8,topk64")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    study, names = Study(options, "encodings"), options.encodings.split(",")
    study.stage("build", lambda: capture(study, names))
    for name in names:
        data, run = study.work / f"data.{name}", f"run.{name}"
        study.stage(f"train {name}", lambda: study.train(data, run, max_steps=options.steps))  # noqa: B023 - called at once
    for name in names:
        draft = study.work / f"run.{name}" / "draft"
        study.stage(f"evaluate {name}", lambda: study.evaluate(draft, name))  # noqa: B023


if __name__ == "__main__":
    main()
