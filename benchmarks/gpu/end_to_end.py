"""From questions to a faster server with SmolLM2-135M-Instruct's real weights: answer, build, train, evaluate.

    python benchmarks/gpu/end_to_end.py --out RESULT.json --work FOLDER --prompts prompts.jsonl     under ten minutes
    ... --device cpu --answers 8 --answer-tokens 24 --in-flight 8 --steps 8 --heldout 2 --evaluate-at 2  to try it

Every stage leaves its result in FOLDER and is skipped when that is there. See `study.py` for what is held out and
counted; `rival.py` and `encodings.py` go on from the same FOLDER.
"""

from __future__ import annotations

import json
import time
from typing import Any

from study import Served, Study, study_parser

from eagle3_data.builders.build import build
from eagle3_data.builders.pool import FlowConfig
from eagle3_data.builders.settings import BuildConfig
from eagle3_data.builders.synth import SynthSpec, synthesise


def answer(study: Study) -> dict[str, Any]:
    """The target's own answers: the first greedy, further ones sampled."""
    options = study.options
    questions = study.work / "train.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in study.train_rows[: options.answers]))
    tokens = 0
    with study.serve("answer") as server:
        began = time.monotonic()
        for number in range(options.samples):
            spec = SynthSpec(max_new_tokens=options.answer_tokens, temperature=0.0 if number == 0 else 0.8)
            out = study.work / f"answers.{number}.jsonl"
            tokens += synthesise(
                questions, study.model, spec, [server.url], out, in_flight=options.in_flight
            ).output_tokens
        seconds = time.monotonic() - began
    questions_asked = min(options.answers, len(study.train_rows))
    return {"questions": questions_asked, "tokens": tokens, "tokens_per_s": tokens / seconds}


ENCODINGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"encoding": "fp8"},
    "topk64": {"last": "topk:64"},
    "fp8-topk64": {"encoding": "fp8", "last": "topk:64"},
}


def capture(study: Study, names: list[str]) -> dict[str, Any]:
    """One build in each encoding, `data.NAME`, out of the same server."""
    found: dict[str, Any] = {}
    with study.capturing() as server:
        for name in names:
            config = BuildConfig(
                out=study.work / f"data.{name}",
                inputs=tuple(str(path) for path in sorted(study.work.glob("answers.[0-9].jsonl"))),
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
                "tokens": report.tokens,
                "tokens_per_s": report.tokens_per_s,
                "bytes_per_token": report.nbytes / max(report.tokens, 1),
            }
    return found


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--answers", type=int, default=3000, help="questions answered for training")
    parser.add_argument("--samples", type=int, default=2, help="answers per question")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the evaluation")
    parser.add_argument("--encodings", default="bf16,fp8,topk64", help="that are built; `encodings.py` trains on them")
    options = parser.parse_args()
    study = Study(options, "end_to_end")
    draft = study.work / "run.bf16" / "draft"
    served = [*study.chains(draft), Served("tree", draft, tree=True)]
    study.stage("answer", lambda: answer(study))
    study.stage("build", lambda: capture(study, options.encodings.split(",")))
    study.stage("train", lambda: study.train(study.work / "data.bf16", "run.bf16"))
    evaluate = lambda: study.evaluate(*served, in_flight=options.evaluate_at, repeats=options.repeats)  # noqa: E731
    study.stage("evaluate", evaluate)


if __name__ == "__main__":
    main()
