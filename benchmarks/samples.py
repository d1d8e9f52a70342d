"""Samples per second on all cores beside a plain `apply_chat_template` loop, and the memory that it takes.

    python benchmarks/samples.py [--rows 100000] [--workers 2] [--template qwen3]

Short conversations (two exchanges, about 170 tokens) are written to a JSONL file; `prepare_samples` turns them into a
store with ids and masks, the plain loop into ids alone. The tokenizer is a byte-level BPE made on the fly, the template
one of tests/samples/templates. "Per core" compares processor time, and the plain loop runs in as many processes at
once as ours, so that neither other work on the machine nor shared caches favour one side. Memory is the proportional
set size of this process and its workers together.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eagle3_data.builders.samples import SampleSpec, prepare_samples
from tests.samples.kit import tokenizer

TEXT = """the a fox dog city river answer question small large quick slow green list of and then because when where
people write read think know find make take give water light house train story number word line"""
WORDS = TEXT.split()
PLAIN_ROWS = 5000
"""Rows of the plain loop; its rate does not depend on how many follow."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=100_000)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--template", default="llama-3.1")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="eagle3-bench-") as folder:
        path = Path(folder) / "conversations.jsonl"
        write_conversations(path, asked.rows)
        plain = plain_loops(path, asked.template, asked.workers)
        peak = PeakMemory()
        with peak:
            started, cpu = time.perf_counter(), cpu_seconds()
            report = prepare_samples(
                path, tokenizer(asked.template), SampleSpec(), Path(folder) / "samples.arrow", workers=asked.workers
            )
            seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
        plain = (plain + plain_loops(path, asked.template, asked.workers)) / 2
    each, ours = cpu / report.rows, f"ours, {asked.workers} processes"
    tokens = report.tokens / report.rows
    print(f"{'rows':20}{report.rows:,} ({asked.template}; {report.samples:,} samples; dropped {dict(report.dropped)})")
    print(f"{'plain loop, ids only':20} {1 / plain:,.0f} conversations/s, {tokens / plain:,.0f} tokens/s per core")
    print(f"{ours:20} {1 / each:,.0f} conversations/s, {tokens / each:,.0f} tokens/s per core")
    print(f"{'ratio per core':20} {plain / each:.2f}")
    clock = f"{report.rows / seconds:,.0f} conversations/s, {report.tokens / seconds:,.0f} tokens/s, {seconds:.1f} s"
    print(f"{'by the clock':20} {clock}")
    print(f"{'peak memory':20} {peak.mib:,.0f} MiB")


def cpu_seconds() -> float:
    """Processor time of this process and its ended children."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def write_conversations(path: Path, rows: int) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for row in range(rows):
            turns = [
                {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(*size)))}
                for role, size in (
                    ("user", (8, 24)),
                    ("assistant", (10, 40)),
                    ("user", (5, 15)),
                    ("assistant", (10, 40)),
                )
            ]
            file.write(json.dumps({"id": str(row), "messages": turns}) + "\n")


def plain_loops(path: Path, template: str, processes: int) -> float:
    """`plain_loop` in several processes at once; the mean."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(plain_loop, [path] * processes, [template] * processes))
    return sum(found) / processes


def plain_loop(path: Path, template: str) -> float:
    """Processor seconds per conversation of reading lines and calling `apply_chat_template`, warmed up."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core, as with ours
    loaded = tokenizer(template)
    with path.open() as file:
        lines = [line for _, line in zip(range(PLAIN_ROWS + 100), file, strict=False)]
    for line in lines[:100]:
        loaded.apply_chat_template(json.loads(line)["messages"])
    started = cpu_seconds()
    for line in lines[100:]:
        loaded.apply_chat_template(json.loads(line)["messages"])
    return (cpu_seconds() - started) / (len(lines) - 100)


class PeakMemory:
    """Watches this process and its children; shared pages count once."""

    def __init__(self) -> None:
        self.mib = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.2):
            self.mib = max(self.mib, sum(proportional_kib(pid) for pid in family(os.getpid())) / 1024)


def family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(grandchild for child in children for grandchild in family(int(child)))]


def proportional_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    main()
