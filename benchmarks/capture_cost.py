"""What capture costs SGLang's scheduler thread apart from the GPU: its own work, and waiting for Python's lock.

    python -m benchmarks.capture_cost [--prompts 16] [--tokens 256] [--width 64] [--batches 200] [--out FILE]

The copier and the process that writes, without SGLang: batches of states on a CPU, dumps written into tmpfs and
removed. States are narrow, so that Python's part shows and not the memory's. Per prompt:

    asked    seconds of the calling thread from a batch to its copies being queued (on a GPU copies are only launched)
    slowed   seconds that a thread which does nothing but compute in Python loses while the writers work

Medians over the batches; `slowed` is against the same loop without writers, before and after.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from eagle3_data.patches.sglang.copier import Copier
from eagle3_data.patches.sglang.dumps import DumpForm
from eagle3_data.patches.sglang.rows import Prompt, Segment
from eagle3_data.patches.sglang.states import BatchStates
from eagle3_data.patches.sglang.writers import Work, Writers
from eagle3_data.protocol import SpoolConfig

LAYERS, VOCAB = 3, 1000


@dataclass(frozen=True)
class Cost:
    asked_us: float
    slowed_us: float


class Bench:
    def __init__(self, options: argparse.Namespace, spool: Path) -> None:
        self.options, self.spool = options, spool
        form = DumpForm(layers=(1, 2, 3), width=options.width, dtype="bfloat16", instance="0" * 16)
        self.copier = Copier("cpu", 512 << 20)
        self.writers = Writers(spool, SpoolConfig(high_water_bytes=8 << 30), form, self.copier.arena)
        rows = options.prompts * options.tokens
        aux = [torch.randn(rows, options.width).bfloat16() for _ in range(LAYERS)]
        last = torch.randn(rows, options.width).bfloat16()
        self.states = BatchStates(aux, last, torch.randn(options.prompts, VOCAB))
        self.ids = array("i", range(options.tokens))

    def ask(self, batch: int) -> float:
        """Queue a batch; seconds of this thread's time per prompt."""
        n, tokens = self.options.prompts, self.options.tokens
        request = SimpleNamespace(finished=lambda: False)
        prompts = [Prompt(f"e3d-bench-{batch:06d}{i:06d}-0", self.ids, request, tokens) for i in range(n)]
        segments = [Segment(prompt, i * tokens, 0, tokens, i, True) for i, prompt in enumerate(prompts)]
        work = Work()
        began = time.thread_time()
        copied, done = self.copier.copy(self.states, segments)
        for segment, rows in zip(segments, copied, strict=True):
            assert rows is not None
            work.rows(segment.prompt, 0, rows)
        self.writers.put(work, done)
        return (time.thread_time() - began) / n

    def compute(self) -> float:
        """Seconds of a loop in Python alone: the scheduler's part of the interpreter."""
        began, total = time.perf_counter(), 0
        for i in range(60_000):
            total += i * i
        return time.perf_counter() - began

    def batch(self, number: int) -> tuple[float, float]:
        written = self.writers.counters.written
        alone = self.compute()
        asked = self.ask(number)
        beside, loops = 0.0, 0
        while self.writers.counters.written < written + self.options.prompts:
            beside += self.compute()
            loops += 1
        for path in self.spool.glob("e3d-*"):
            path.unlink()
        alone = (alone + self.compute()) / 2
        return asked, (beside - loops * alone) / self.options.prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="of one batch")
    parser.add_argument("--tokens", type=int, default=256, help="of one prompt")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="eagle3-bench-", dir=options.memory) as spool:
        bench = Bench(options, Path(spool))
        pairs = [bench.batch(number) for number in range(options.batches)][options.batches // 10 :]
        bench.writers.close()
    cost = Cost(*(1e6 * statistics.median(values) for values in zip(*pairs, strict=True)))
    print(f"asked {cost.asked_us:.0f} us a prompt, another thread slowed by {cost.slowed_us:.0f} us a prompt")
    if options.out is not None:
        options.out.write_text(json.dumps(asdict(cost)) + "\n")


if __name__ == "__main__":
    main()
