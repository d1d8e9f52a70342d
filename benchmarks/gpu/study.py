"""What the studies with real weights share: the questions, the stages that go on where they stopped, training, serving.

A fixed tenth of each source (by a hash of the id) is never answered for training; drafts are evaluated on it.
MFU counts the draft's matrix products alone (6 x weights x supervised position x step; attention scores, the teacher's
logits and padding are not counted), over the card's bfloat16 rate given with --peak-tflops.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host import Host, Results, steady_rate, together

from eagle3_data.builders.smollm2 import make_checkpoint
from eagle3_data.train.eval_prompts import EvalPrompt, read_prompts
from eagle3_data.train.evaluate import EvalReport, make_report
from eagle3_data.train.measure import Decoder, EvalConfig, measure

HOLDOUT = 10
DRAFT_TOKENS = 3
STAGES = ("answer", "build", "features", "train", "evaluate")
TREE = (
    *("--speculative-num-steps", str(DRAFT_TOKENS), "--speculative-eagle-topk", "4"),
    *("--speculative-num-draft-tokens", "8"),
)
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Served:
    """One server of an evaluation."""

    name: str
    draft: Path | None = None
    """None: the target alone."""
    draft_tokens: int = DRAFT_TOKENS
    tree: bool = False


def split(path: Path) -> tuple[Rows, Rows]:
    """(training, held out): of each source, the tenth of the ids with the lowest hashes is held out."""
    sources: dict[str, Rows] = defaultdict(list)
    for line in filter(None, path.read_text().split("\n")):  # splitlines() also breaks at U+2028
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


def study_parser(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of the study's data, models and runs")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with id, source, prompt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--in-flight", type=int, default=256, help="while answering and capturing")
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument(
        "--steps", type=int, default=800, help="of our training; SpecForge takes as many as that run took"
    )
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--heldout", type=int, default=256, help="held-out questions that are evaluated")
    parser.add_argument(
        "--chains", type=numbers, default=[3, 6, 10], help="draft tokens of the chains that are evaluated"
    )
    parser.add_argument("--evaluate-at", type=numbers, default=[64, 1], help="requests in flight")
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="bfloat16 products measured on this card")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="folder for spools")
    parser.add_argument("--stages", type=stages, default=list(STAGES), help="kinds of stages that are gone through")
    return parser


def stages(text: str) -> list[str]:
    found = text.split(",")
    if unknown := sorted(set(found) - set(STAGES)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(STAGES)}")
    return found


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


class Study:
    """Stages with results; each is skipped when it was done before, so a study that was cut off goes on."""

    def __init__(self, options: argparse.Namespace, benchmark: str) -> None:
        self.options, self.work, self.benchmark = options, options.work, benchmark
        self.work.mkdir(parents=True, exist_ok=True)
        self.host = Host(device=options.device, memory_share=0.4, log_folder=self.work)
        settings = {key: str(value) for key, value in vars(options).items() if key not in ("out", "work", "prompts")}
        self.results = Results(options.out, benchmark, settings, "cpu" if self.host.cpu else "cuda")
        if options.out.exists():
            self.results.rows = json.loads(options.out.read_text())["rows"]
        self.model = make_checkpoint(self.work / "models")
        self.train_rows, self.heldout_rows = split(options.prompts)

    def stage(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """The first word of a stage's name is its kind."""
        if name.split()[0] not in self.options.stages:
            return
        done = self.work / f"{self.benchmark}.{name}.done"
        if done.exists():
            print(f"{name}: done before", flush=True)
            return
        began = time.monotonic()
        found = work()
        self.results.add(stage=name, seconds=time.monotonic() - began, **found)
        done.touch()

    def serve(self, name: str, served: Served | None = None) -> Any:
        """A server that decodes: graphs on where there is a GPU. One that is evaluated shares the GPU with others."""
        more: tuple[str, ...] = ()
        if served is not None:
            most = max(self.options.evaluate_at)
            more = ("--max-running-requests", str(most))
            if not self.host.cpu:  # what others take while it starts must not leave it without a cache
                more += ("--max-total-tokens", "200000", "--mem-fraction-static", "0.8")
        else:
            most = self.options.in_flight
        if not self.host.cpu:
            more += ("--cuda-graph-max-bs-decode", str(most))
        config = self.host.config(
            self.model,
            spool=None,
            more=(*more, *TREE) if served is not None and served.tree else more,
            draft=str(served.draft) if served is not None and served.draft is not None else None,
            speculative_steps=served.draft_tokens if served is not None else DRAFT_TOKENS,
        )
        return self.host.serving(config, f"{self.benchmark}.{name}")

    def capturing(self) -> Any:
        spool = self.options.memory / f"eagle3-{self.work.name}-{self.benchmark}"
        return self.host.serving(self.host.config(self.model, spool=spool), f"{self.benchmark}.capture")

    def train(self, data: Path, name: str) -> dict[str, Any]:
        """Train on `data` into `work/name`, export to `work/name/draft`."""
        import torch

        from eagle3_data.shards import ShardSet
        from eagle3_data.train.config import parse_config
        from eagle3_data.train.export import export_draft
        from eagle3_data.train.trainer import Trainer

        options, folder = self.options, self.work / name
        values = {
            "data": {"folder": str(data), "max_sample_tokens": 1024, "holdout_max_samples": 128},
            "target": {"model": str(self.model)},
            "draft": {"vocab_size": 16384, "fc_norm": True, "norm_output": True},
            "ttt": {"steps": options.ttt_steps},
            "batch": {"micro_batch_tokens": options.batch_tokens, "batches_per_step": 1, "packing": True}
            | {"pad_multiple": 128},
            "optim": {"lr": options.lr, "epochs": 100, "warmup_share": 0.05, "max_steps": options.steps},
            "run": {"output": str(folder), "precision": "fp32" if self.host.cpu else "bf16"}
            | {"eval_every_steps": 2000, "checkpoint_every_steps": 2000, "log_every_s": 5.0, "trackers": []},
        }
        shards = ShardSet.open(data)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        report = Trainer(parse_config(values, source=name), shards).run()
        seconds = time.monotonic() - began
        export_draft(
            folder,
            folder / "draft",
            engine="sglang",
            dtype="float32" if self.host.cpu else "bfloat16",
            target=str(self.model),
            draft_tokens=DRAFT_TOKENS,
        )
        rate = steady_rate(folder)
        return {
            "steps": report.state.step,
            "tokens": report.state.tokens,
            "train_seconds": seconds,
            "first_loss": report.state.first_loss,
            "last_loss": report.state.last_loss,
            "simulated_acceptance": report.state.best_acceptance,
            "tokens_per_s": rate,
            "mfu": rate * self.flops_per_token(folder / "draft", shards) / (options.peak_tflops * 1e12),
            "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        }

    def flops_per_token(self, draft: Path, data: Any) -> float:
        """Per token of a sample, of which only supervised positions go through the steps."""
        from safetensors import safe_open

        from eagle3_data.protocol import MASK

        sizes = {}
        for path in draft.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    shape = file.get_slice(name).get_shape()
                    sizes[name] = shape[0] * shape[1] if len(shape) == 2 else 0
        repeated = sum(size for name, size in sizes.items() if "embed" not in name and not name.startswith("fc"))
        once = sum(size for name, size in sizes.items() if name.startswith("fc"))
        some = [data.read(i, (MASK,))[MASK] for i in range(0, len(data), max(1, len(data) // 200))]
        supervised = sum(int(mask.sum()) for mask in some) / sum(len(mask) for mask in some)
        return 6.0 * (once + supervised * self.options.ttt_steps * repeated)

    # --------------------------------------------------------- evaluation

    def heldout(self) -> list[EvalPrompt]:
        path = self.work / "heldout.jsonl"
        hidden = path.with_suffix(f".{os.getpid()}")  # several studies may be at work here
        hidden.write_text("".join(json.dumps(row) + "\n" for row in self.heldout_rows[: self.options.heldout]))
        hidden.rename(path)
        return read_prompts(path, str(self.model), trust_remote_code=False, limit=None)

    def chains(self, draft: Path) -> list[Served]:
        """The target alone, and with the draft in chains."""
        return [Served("plain"), *(Served(f"chain of {n}", draft, draft_tokens=n) for n in self.options.chains)]

    def evaluate(self, *served: Served, in_flight: list[int], repeats: int) -> dict[str, Any]:
        """Held-out questions, greedy, in a server for each of `served`: all of them up on one GPU, taking turns.

        With one without a draft among them a speed-up is the median of the rounds' ratios to it.
        """
        prompts, found = self.heldout(), {}
        with together(*(self.serve(one.name, one) for one in served)) as servers:
            decoders = [Decoder(server.url, one.draft is not None) for one, server in zip(served, servers, strict=True)]
            for n in in_flight:
                some = prompts if n > 1 else prompts[: max(1, len(prompts) // 8)]  # one at a time takes long
                config = self._config(n, repeats)
                results = asyncio.run(measure(decoders, some, config))
                alone = (result for one, result in zip(served, results, strict=True) if one.draft is None)
                plain = next(alone, None)
                for one, result in zip(served, results, strict=True):
                    figures: dict[str, Any] = {"rounds": repeats, "tokens_per_s": result.tokens_per_s}
                    if one.draft is not None:
                        report = make_report(result, plain, config, draft=one.name, took_turns=True)
                        figures |= {"prompts": len(some), **chosen_figures(report)}
                    found.setdefault(one.name, {})[f"in_flight_{n}"] = figures
        return found

    def _config(self, in_flight: int, rounds: int) -> EvalConfig:
        return EvalConfig(
            target=str(self.model),
            max_new_tokens=self.options.answer_tokens,
            concurrency=in_flight,
            rounds=rounds,
        )


def chosen_figures(report: EvalReport) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "acceptance_length": report.overall.acceptance_length,
        "acceptance_length_diverse": report.diverse_only.acceptance_length,
        "by_position": report.overall.by_position,
        "by_source": {name: part.acceptance_length for name, part in report.by_category.items()},
    }
    if report.speedups:
        figures |= {"plain_tokens_per_s": report.plain_tokens_per_s, "speedup": report.speedup}
        figures |= {"speedups": report.speedups, "equal_answers": report.equal_answers}
    return figures
