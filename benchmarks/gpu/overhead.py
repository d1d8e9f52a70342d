"""What capture costs: the same load on a plain server, on a capturing one, and through the whole build.

    python benchmarks/gpu/overhead.py --out RESULT.json                       about nine minutes on one GPU
    ... --device cpu --shape tiny --cases 64x4,64x1 --budget 1000   to try it

Both servers stay up and take turns, `--repeats` times, each first in every other round, so a drifting machine favours
neither. A case's figure is the median; the ratios are those of one round. `--soak N` sends N short prompts first and
compares the capturing server's GPU memory before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from host import Host, Results, dummy, server_memory_mib, together
from load import Case, run_case
from shapes import make_model, text_config

from eagle3_data.builders.build import build
from eagle3_data.builders.pool import FlowConfig
from eagle3_data.builders.settings import BuildConfig
from eagle3_data.server.process import ServerProcess


class Bench:
    """One run: where it measures and until when."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ends = time.monotonic() + options.minutes * 60
        self.host = Host(device=options.device, memory_share=0.75, log_folder=options.out.parent)  # two share the GPU
        self.vocab = int(text_config(options.shape)["vocab_size"])
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        self.results = Results(options.out, "overhead", settings, "cpu" if self.host.cpu else "cuda")
        self.runs = 0

    @property
    def over(self) -> bool:
        return time.monotonic() > self.ends

    def cases(self) -> list[Case]:
        """In the order given: should time run out, the first ones are there."""
        found: list[Case] = []
        for tokens, in_flight in self.options.cases:
            budget = self.options.budget if in_flight > 1 else self.options.budget // 2
            found.append(Case(tokens, in_flight, max(budget // tokens, in_flight)))
        return found

    def load(self, mode: str, server: ServerProcess, case: Case, spool: Path | None, repeat: int) -> None:
        self.runs += 1
        seed, run = case.tokens * 1000 + case.in_flight * 10 + repeat, f"r{self.runs}"
        measured = asyncio.run(run_case(server.url, case, self.vocab, seed=seed, run=run, spool=spool))
        if repeat >= 0:  # the first pass of a length compiles kernels
            self.results.add(mode=mode, repeat=repeat, **vars(case), **measured.to_dict())

    def build(self, mode: str, server: ServerProcess, model: Path, case: Case, folder: Path, repeat: int) -> None:
        """Such prompts through `eagle3-data build`, sealed shards included; more of them, as start and end count."""
        case = replace(case, requests=case.requests * self.options.build_factor)
        dice = random.Random(repeat)
        rows = folder / "rows.jsonl"
        with rows.open("w") as file:
            for i in range(case.requests):
                ids = [dice.randrange(8, self.vocab) for _ in range(case.tokens)]
                row = {"id": str(i), "input_ids": ids, "loss_mask": [0] + [1] * (case.tokens - 1)}
                file.write(json.dumps(row) + "\n")
        out = folder / "data"
        config = BuildConfig(
            out=out,
            inputs=(str(rows),),
            model=str(model),
            servers=(server.url,),
            flow=FlowConfig(max_inflight=case.in_flight),
            interval_s=1.0,
        )
        report = build(config, on_tick=lambda _tick: None, on_text=lambda _text: None)
        shutil.rmtree(out)
        self.results.add(
            mode=mode,
            repeat=repeat,
            **vars(case),
            tokens_per_s=report.tokens_per_s,
            saved=report.saved,
            errors=report.failed,
            retried=report.retried,
            dump_bytes=report.nbytes,
        )


CASES = "2353x64,256x64,2353x16,256x16,8192x16,2353x1,256x1,8192x1,8192x64"


def pairs(text: str) -> list[tuple[int, int]]:
    """'2353x64,256x1' -> [(2353, 64), (256, 1)]"""
    return [(int(tokens), int(in_flight)) for tokens, _, in_flight in (one.partition("x") for one in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", default="llama_8b")
    parser.add_argument(
        "--cases", type=pairs, default=pairs(CASES), help="prompt tokens x in flight; the first is built"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=int, default=160_000, help="prompt tokens of one pass")
    parser.add_argument("--build-factor", type=int, default=5, help="a build has so many passes' prompts; 0: none")
    parser.add_argument("--minutes", type=float, default=8.5, help="no new pass is begun after this long")
    parser.add_argument("--kv-tokens", type=int, default=200_000, help="of each server: two share the GPU")
    parser.add_argument("--soak", type=int, default=0, help="short prompts for the memory check")
    parser.add_argument("--disk", type=Path, default=Path("/tmp"), help="folder for shards on a disk")
    parser.add_argument(
        "--memory", type=Path, default=Path("/dev/shm"), help="folder for the spool and shards in memory"
    )
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    with contextlib.ExitStack() as stack:
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eagle3-bench-", dir=options.memory)))
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eagle3-bench-", dir=options.disk)))
        model = make_model(options.shape, disk, dtype="float32" if bench.host.cpu else "bfloat16")
        flags = dummy("--disable-cuda-graph", "--max-total-tokens", str(options.kv_tokens))
        spool = memory / "spool"
        both = [
            bench.host.serving(bench.host.config(model, spool=where, more=flags), name)
            for name, where in (("plain", None), ("capture", spool))
        ]
        plain, ours = stack.enter_context(together(*both))
        measure(bench, plain, ours, spool, model, {"build to memory": memory, "build to disk": disk})


def measure(
    bench: Bench, plain: ServerProcess, ours: ServerProcess, spool: Path, model: Path, builds: dict[str, Path]
) -> None:
    options = bench.options
    bench.results.add(mode="start", plain_mib=server_memory_mib(plain), capture_mib=server_memory_mib(ours))
    for tokens in dict.fromkeys(tokens for tokens, _ in options.cases):
        warm = Case(tokens, 8, 8)
        bench.load("plain", plain, warm, None, -1)
        bench.load("dump", ours, warm, spool, -1)
    bench.results.add(mode="warm", plain_mib=server_memory_mib(plain), capture_mib=server_memory_mib(ours))
    if options.soak:
        case = Case(256, 64, options.soak)
        bench.load("soak", ours, case, spool, 0)
        bench.results.add(mode="soaked", requests=options.soak, capture_mib=server_memory_mib(ours))
    for case in bench.cases():
        for repeat in range(options.repeats):
            if bench.over:
                print("out of time: the rest is left out", flush=True)
                return
            turns = [("plain", plain, None), ("dump", ours, spool)]
            for mode, server, where in turns if repeat % 2 == 0 else reversed(turns):
                bench.load(mode, server, case, where, repeat)
            if options.build_factor and (case.tokens, case.in_flight) == options.cases[0]:
                for mode, folder in builds.items():
                    bench.build(mode, ours, model, case, folder, repeat)
    bench.results.add(mode="end", plain_mib=server_memory_mib(plain), capture_mib=server_memory_mib(ours))


if __name__ == "__main__":
    main()
