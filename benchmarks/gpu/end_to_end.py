"""From questions to a faster server with SmolLM2-135M-Instruct's real weights: answer, build, train, evaluate.

    python benchmarks/gpu/end_to_end.py --out RESULT.json --work FOLDER --prompts prompts.jsonl     under ten minutes
    ... --device cpu --answers 8 --answer-tokens 24 --in-flight 8 --minutes 0.3 --heldout 2 --evaluate-at 2  to try it

A fixed tenth of each source (by a hash of the id) is never answered for training; the draft is evaluated on it.
Every stage leaves its result in FOLDER and is skipped when that is there, so a run that is cut off goes on later.
MFU counts the draft's matrix products alone (6 x weights x supervised position x step; attention scores, the teacher's
logits and padding are not counted), over the card's bfloat16 rate given with --peak-tflops.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from host import Host, Results

from eagle3_data.builders.build import build
from eagle3_data.builders.pool import FlowConfig
from eagle3_data.builders.settings import BuildConfig
from eagle3_data.builders.smollm2 import make_checkpoint
from eagle3_data.builders.synth import SynthSpec, synthesise
from eagle3_data.server.process import ServerProcess
from eagle3_data.train.eval_prompts import EvalPrompt, read_prompts
from eagle3_data.train.evaluate import EvalConfig, make_report, measure

HOLDOUT = 10
Rows = list[dict[str, Any]]


def split(path: Path) -> tuple[Rows, Rows]:
    """(training, held out): of each source, the tenth of the ids with the lowest hashes is held out."""
    sources: dict[str, Rows] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        sources[str(row["source"])].append(row)
    train: Rows = []
    heldout: Rows = []
    for rows in sources.values():
        rows.sort(key=lambda row: hashlib.sha256(str(row["id"]).encode()).hexdigest())
        cut = max(1, len(rows) // HOLDOUT)
        heldout += rows[:cut]
        train += rows[cut:]
    order = lambda row: hashlib.sha256(f"order {row['id']}".encode()).hexdigest()  # noqa: E731
    return sorted(train, key=order), sorted(heldout, key=order)


class EndToEnd:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work = options, options.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.host = Host(device=options.device, memory_share=0.5, log_folder=self.work)
        settings = {key: str(value) for key, value in vars(options).items() if key not in ("out", "work", "prompts")}
        self.results = Results(options.out, "end_to_end", settings, "cpu" if self.host.cpu else "cuda")
        if options.out.exists():
            self.results.rows = json.loads(options.out.read_text())["rows"]
        self.model = make_checkpoint(self.work / "models")
        self.train_rows, self.heldout_rows = split(options.prompts)

    def stage(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        done = self.work / f"{name}.done"
        if done.exists():
            print(f"{name}: done before", flush=True)
            return
        began = time.monotonic()
        found = work()
        self.results.add(stage=name, seconds=time.monotonic() - began, **found)
        done.touch()

    def serve(self, name: str, **named: Any) -> Any:
        """A server that decodes: graphs on where there is a GPU."""
        return self.host.serving(self.host.config(self.model, more=(), **{"spool": None, **named}), name)

    # ------------------------------------------------------------- stages

    def answer(self) -> dict[str, Any]:
        """The target's own answers: the first greedy, further ones sampled."""
        options = self.options
        questions = self.work / "train.jsonl"
        questions.write_text("".join(json.dumps(row) + "\n" for row in self.train_rows[: options.answers]))
        tokens = 0
        with self.serve("answer") as server:
            began = time.monotonic()
            for number in range(options.samples):
                spec = SynthSpec(max_new_tokens=options.answer_tokens, temperature=0.0 if number == 0 else 0.8)
                out = self.work / f"answers.{number}.jsonl"
                tokens += synthesise(
                    questions, self.model, spec, [server.url], out, in_flight=options.in_flight
                ).output_tokens
            seconds = time.monotonic() - began
        return {
            "questions": min(options.answers, len(self.train_rows)),
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
        }

    def build(self) -> dict[str, Any]:
        spool = self.options.memory / f"eagle3-{self.work.name}-spool"
        with self.host.serving(self.host.config(self.model, spool=spool), "capture") as server:
            config = BuildConfig(
                out=self.work / "data",
                inputs=tuple(str(path) for path in sorted(self.work.glob("answers.*.jsonl"))),
                model=str(self.model),
                servers=(server.url,),
                flow=FlowConfig(max_inflight=self.options.in_flight),
            )
            report = build(config, on_tick=lambda _tick: None, on_text=print)
        return {
            "saved": report.saved,
            "failed": report.failed,
            "tokens": report.tokens,
            "bytes": report.nbytes,
            "tokens_per_s": report.tokens_per_s,
        }

    def train(self) -> dict[str, Any]:
        import torch

        from eagle3_data.shards import ShardSet
        from eagle3_data.train.config import parse_config
        from eagle3_data.train.export import export_draft
        from eagle3_data.train.trainer import Trainer

        values = {
            "data": {"folder": str(self.work / "data"), "max_sample_tokens": 1024, "holdout_max_samples": 128},
            "target": {"model": str(self.model)},
            "draft": {"vocab_size": 16384, "fc_norm": True, "norm_output": True},
            "ttt": {"steps": self.options.ttt_steps},
            "batch": {"micro_batch_tokens": self.options.batch_tokens, "batches_per_step": 1, "packing": True}
            | {"pad_multiple": 128},
            "optim": {"lr": self.options.lr, "epochs": 100, "max_minutes": self.options.minutes, "warmup_share": 0.05},
            "run": {"output": str(self.work / "run"), "precision": "fp32" if self.host.cpu else "bf16"}
            | {"eval_every_steps": 2000, "checkpoint_every_steps": 2000, "log_every_s": 5.0},
        }
        data = ShardSet.open(self.work / "data")
        report = Trainer(parse_config(values, source="end_to_end"), data).run()
        exported = export_draft(
            self.work / "run",
            self.work / "draft",
            engine="sglang",
            dtype="float32" if self.host.cpu else "bfloat16",
            target=str(self.model),
            draft_tokens=3,
        )
        lines = [json.loads(line) for line in (self.work / "run" / "metrics.jsonl").read_text().splitlines()]
        rates = [line["train/tokens_per_s"] for line in lines if "train/tokens_per_s" in line]
        steady = sorted(rates[len(rates) // 2 :])
        rate = steady[len(steady) // 2] if steady else 0.0
        flops = self.flops_per_token(exported.folder, data)
        memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return {
            "steps": report.state.step,
            "tokens": report.state.tokens,
            "first_loss": report.state.first_loss,
            "last_loss": report.state.last_loss,
            "simulated_acceptance": report.state.best_acceptance,
            "tokens_per_s": rate,
            "mfu": rate * flops / (self.options.peak_tflops * 1e12),
            "peak_bytes": memory,
        }

    def flops_per_token(self, draft: Path, data: Any) -> float:
        """Per token of a sample, of which only supervised positions go through the steps."""
        from safetensors import safe_open

        sizes = {}
        for path in draft.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    shape = file.get_slice(name).get_shape()
                    sizes[name] = shape[0] * shape[1] if len(shape) == 2 else 0
        repeated = sum(size for name, size in sizes.items() if "embed" not in name and not name.startswith("fc"))
        once = sum(size for name, size in sizes.items() if name.startswith("fc"))
        from eagle3_data.protocol import MASK

        some = [data.read(i, (MASK,))[MASK] for i in range(0, len(data), max(1, len(data) // 200))]
        supervised = sum(int(mask.sum()) for mask in some) / sum(len(mask) for mask in some)
        return 6.0 * (once + supervised * self.options.ttt_steps * repeated)

    def evaluate(self) -> dict[str, Any]:
        """Held-out questions, plain and with the draft, at each number in flight; greedy."""
        path = self.work / "heldout.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in self.heldout_rows[: self.options.heldout]))
        prompts = read_prompts(path, str(self.model), trust_remote_code=False, limit=None)
        with self.serve("plain") as server:
            plain = {n: self.measure(server, prompts, n, draft=False) for n in self.options.evaluate_at}
        found: dict[str, Any] = {"prompts": len(prompts)}
        draft = str(self.work / "draft")
        with self.serve("draft", draft=draft, speculative_steps=3) as server:
            for n in self.options.evaluate_at:
                config = self.evaluation(n)
                report = make_report(
                    self.measure(server, prompts, n, draft=True), plain[n], config, draft="end_to_end"
                ).to_dict()
                found[f"in_flight_{n}"] = {
                    "acceptance_length": report["overall"]["acceptance_length"],
                    "acceptance_length_diverse": report["diverse_only"]["acceptance_length"],
                    "by_source": {k: part["acceptance_length"] for k, part in report["by_category"].items()},
                    "tokens_per_s": report["tokens_per_s"],
                    "plain_tokens_per_s": report["plain_tokens_per_s"],
                    "speedup": report["speedup"],
                    "equal_answers": report["equal_answers"],
                }
        return found

    def evaluation(self, in_flight: int) -> EvalConfig:
        return EvalConfig(
            target=str(self.model), max_new_tokens=self.options.answer_tokens, concurrency=in_flight, draft_tokens=3
        )

    def measure(self, server: ServerProcess, prompts: list[EvalPrompt], in_flight: int, *, draft: bool) -> Any:
        some = prompts if in_flight > 1 else prompts[: max(1, len(prompts) // 8)]  # one at a time takes long
        return asyncio.run(measure(server.url, some, self.evaluation(in_flight), expect_draft=draft))


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with id, source, prompt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--answers", type=int, default=8000, help="questions answered for training")
    parser.add_argument("--samples", type=int, default=2, help="answers per question")
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--minutes", type=float, default=3.0, help="of training")
    parser.add_argument("--ttt-steps", type=int, default=4)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--heldout", type=int, default=256, help="held-out questions that are evaluated")
    parser.add_argument("--evaluate-at", type=numbers, default=[64, 1], help="requests in flight")
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="bfloat16 products measured on this card")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    run = EndToEnd(parser.parse_args())
    run.stage("answer", run.answer)
    run.stage("build", run.build)
    run.stage("train", run.train)
    run.stage("evaluate", run.evaluate)


if __name__ == "__main__":
    main()
