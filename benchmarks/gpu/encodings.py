"""The same training on fp8 and top-k data: what an encoding costs in acceptance length.

    python benchmarks/gpu/encodings.py --out RESULT.json --work FOLDER --prompts prompts.jsonl    after end_to_end.py

Trains on each of end_to_end.py's builds as that did on bf16, the same steps in the same order, and evaluates these
drafts and its own, which must be there by then, in the real server.
"""

from __future__ import annotations

from study import Served, Study, study_parser


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--encodings", default="fp8,topk64")
    options = parser.parse_args()
    study = Study(options, "encodings")
    names = options.encodings.split(",")
    for name in names:
        study.stage(f"train {name}", lambda: study.train(study.work / f"data.{name}", f"run.{name}"))  # noqa: B023
    served = [Served(name, study.work / f"run.{name}" / "draft") for name in ("bf16", *names)]
    evaluate = lambda: study.evaluate(*served, in_flight=options.evaluate_at[:1], repeats=1)  # noqa: E731
    study.stage(f"evaluate {options.encodings}", evaluate)


if __name__ == "__main__":
    main()
