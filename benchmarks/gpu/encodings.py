"""The same training on fp8 and top-k data: what an encoding costs in acceptance length.

    python benchmarks/gpu/encodings.py --out RESULT.json --work FOLDER --prompts prompts.jsonl    after end_to_end.py

Trains on each of end_to_end.py's builds as that did on bf16, the same steps in the same order, and evaluates each draft
in the real server; end_to_end.py's own training and chain are what they are compared with.
"""

from __future__ import annotations

from study import Served, Study, study_parser


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--encodings", default="fp8,topk64")
    options = parser.parse_args()
    study = Study(options, "encodings")
    for name in options.encodings.split(","):
        data, run = study.work / f"data.{name}", f"run.{name}"
        served = Served(name, study.work / run / "draft")
        study.stage(f"train {name}", lambda: study.train(data, run))  # noqa: B023 - called at once
        evaluate = lambda: study.evaluate(served, in_flight=options.evaluate_at[:1], repeats=1)  # noqa: B023, E731
        study.stage(f"evaluate {name}", evaluate)


if __name__ == "__main__":
    main()
