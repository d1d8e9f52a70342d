"""What grows with a build and what does not: `status` on a long journal, memory of `build` on many planned samples.

    python -m benchmarks.scale [--out benchmarks/results/scale.json]      (about three minutes on two cores)

The journal has a line for each of 1,000,000 samples, far more than a real one. The two builds have 1,000 and 1,000,000
planned samples; each is stopped after a few hundred, and its peak memory is what the kernel says of the process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.host import Results
from eagle3_data.journal import Journal, Tick, journal_path
from eagle3_data.status import read_status
from tests.models import VOCAB, tiny_model
from tests.replay import SPEC, ReplayServer

PLANNED = (1_000, 1_000_000)
SAVED = 400
TOKENS = 8
DRIVER = """
import os, resource, signal, sys
from pathlib import Path
from tests.builders.conftest import Builds
builds = Builds(Path(sys.argv[1]), Path(sys.argv[2]))
stop_at, pid, build = int(sys.argv[6]), os.getpid(), builds.ticks
class Ticks(list):
    def append(self, tick):
        if tick.event == "tick" and tick.done >= stop_at:
            os.kill(pid, signal.SIGINT)
builds.ticks = Ticks()
report = builds.run(sys.argv[3], Path(sys.argv[4]), sys.argv[5], interval_s=0.1, shard_bytes=1 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, report.saved, report.planned)
"""


def line(number: int) -> Tick:
    return Tick(
        event="tick" if number else "start",
        t=time.time() - 1_000_000 + number,
        phase="extract",
        done=number,
        of=1_000_000,
        tokens=number * 2353,
        tokens_of=1_000_000 * 2353,
        nbytes=number << 17,
        nbytes_of=1_000_000 << 17,
    )


def status_of_a_long_journal(folder: Path, results: Results) -> None:
    Journal(folder).close()
    with journal_path(folder).open("w") as file:
        file.writelines(line(number).to_line() for number in range(1_000_001))
    began = time.perf_counter()
    status = read_status(folder)
    read_s = time.perf_counter() - began
    assert status.done == 1_000_000
    began = time.perf_counter()
    code = "import sys; from eagle3_data.cli import main; sys.argv = ['eagle3-data', 'status', sys.argv[1]]; main()"
    subprocess.run([sys.executable, "-c", code, str(folder)], stdout=subprocess.DEVNULL, check=False)
    whole_s = time.perf_counter() - began
    size = journal_path(folder).stat().st_size
    results.add(what="status", samples=1_000_000, journal_bytes=size, read_s=read_s, command_s=whole_s)


def memory_of_a_build(folder: Path, planned: int, results: Results) -> None:
    samples = folder / f"{planned}.jsonl"
    with samples.open("w") as file:
        for number in range(planned):
            ids = [(number + place) % VOCAB for place in range(TOKENS)]
            file.write(json.dumps({"id": f"r{number}", "input_ids": ids, "loss_mask": [0] + [1] * (TOKENS - 1)}) + "\n")
    model, rss = tiny_model("llama"), 0
    with ReplayServer(folder / f"spool-{planned}", replace(SPEC, model=str(model), vocab_size=VOCAB)) as server:
        for stop_at in (1, SAVED):  # the first run renders the samples, the second is the one that lasts for days
            command = [sys.executable, "-c", DRIVER, str(folder), str(model), f"out-{planned}", str(samples)]
            done = subprocess.run([*command, server.url, str(stop_at)], capture_output=True, text=True, check=True)
            rss, saved, total = (int(word) for word in done.stdout.split()[-3:])
    assert total == planned
    results.add(what="build", planned=planned, stopped_at=saved, peak_mib=rss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scale.json"))
    results = Results(parser.parse_args().out, "scale", {"planned": PLANNED, "tokens": TOKENS}, "cpu")
    with tempfile.TemporaryDirectory(prefix="eagle3-scale-") as folder:
        status_of_a_long_journal(Path(folder) / "journal", results)
        for planned in PLANNED:
            memory_of_a_build(Path(folder), planned, results)


if __name__ == "__main__":
    main()
