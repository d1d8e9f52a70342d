"""Gigabytes per second of states from warm shards into one buffer, beside other ways of reading the same files.

    python benchmarks/read.py [--samples 5 50 352] [--bytes 700] [--rounds 3] [--folder DIR] [--write]

For each sample size (MB) a build with Kimi-K2.5's widths (three aux layers of 7,168 in bfloat16) is written, read once,
and then read by every way in turn, `--rounds` times; the median round counts. Every way ends with the states of every
sample in the same preallocated buffer, as a training loop needs them:

    raw read            readinto() of the whole file, sample by sample, into the buffer: the ceiling
    ours, read_into     ShardSet.read_into: what the training loader's buffers get
    ours, mmap          ShardSet.read: a view of the mapped shard, copied into the buffer
    ours, load_dataset  rows of the map-style data set; and of the stream
    ours, http          RemoteShardSet.read_into from a web server in this process (shares the two cores)
    datasets            plain load_dataset(folder, streaming=True) and safetensors.torch.load
    webdataset          plain webdataset.WebDataset and safetensors.torch.load

`--write` puts the sizes of this run into benchmarks/results/read.json and the table into docs/reading.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from eagle3_data.capture import CaptureSpec
from eagle3_data.card import write_card
from eagle3_data.protocol import AUX
from eagle3_data.shards import RemoteShardSet, ShardSet
from tests.builds import make_build
from tests.webserver import FolderServer

SPEC = CaptureSpec(model="kimi", layers=(1, 29, 57), width=7168, last="none", vocab_size=163_840)
ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCS = ROOT / "benchmarks" / "results" / "read.json", ROOT / "docs" / "reading.md"
BEGIN, END = "<!-- made by benchmarks/read.py -->", "<!-- end -->"
Way = Callable[[], Iterator[torch.Tensor | None]]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=float, nargs="+", default=[5, 50, 352], help="MB of one sample")
    options.add_argument("--bytes", type=float, default=700, help="MB of one build")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--folder", default=None, help="where to write the builds")
    options.add_argument("--write", action="store_true", help="keep the figures")
    asked = options.parse_args()
    torch.set_num_threads(1)  # a copy in several threads waits for the slowest, and the raw read has one
    for megabytes in asked.samples:
        with tempfile.TemporaryDirectory(prefix="eagle3-bench-", dir=asked.folder) as folder:
            os.environ["HF_HOME"] = folder
            rates = measure(Path(folder), megabytes, max(2, round(asked.bytes / megabytes)), asked.rounds)
        if asked.write:
            keep(f"{megabytes:g}", rates)


def keep(megabytes: str, rates: dict[str, list[float]]) -> None:
    """Put one size's rounds into the results, and the table of all sizes into the docs."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"GB/s by sample size (MB), every round": {}}
    sizes = results["GB/s by sample size (MB), every round"]
    sizes[megabytes] = {name: [round(rate, 3) for rate in found] for name, found in rates.items()}
    results["versions"] = {name: version(name) for name in ("torch", "datasets", "webdataset", "safetensors")}
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}"
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    columns = sorted(sizes, key=float)
    lines = [
        "| | " + " | ".join(f"{size} MB" for size in columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for name in sizes[columns[0]]:
        cells = []
        for size in columns:
            found, raw = statistics.median(sizes[size][name]), statistics.median(sizes[size]["raw read"])
            web = statistics.median(sizes[size]["webdataset"])
            cells.append(f"{found:.2f} GB/s, {found / raw:.2f} of raw, {found / web:.1f} x webdataset")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    before, _, rest = DOCS.read_text().partition(BEGIN)
    DOCS.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.partition(END)[2]}")


def measure(folder: Path, megabytes: float, count: int, rounds: int) -> dict[str, list[float]]:
    tokens = round(megabytes * 1e6 / SPEC.state_bytes_per_token)
    build = folder / "build"
    make_build(build, [tokens] * count, per_shard=max(1, round(350 / megabytes)), spec=SPEC)
    for dump in (folder / "build.dumps").iterdir():
        dump.unlink()
    data = ShardSet.open(build)
    write_card(build, data.manifest)
    size = tokens * SPEC.state_bytes_per_token
    buffer = torch.empty(tokens, 3 * SPEC.width, dtype=torch.bfloat16)
    with FolderServer(build) as server:
        ways = make_ways(data, buffer, server.url)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, way in ways.items():
                started, number = time.perf_counter(), 0
                for states in way():
                    if states is not None:
                        buffer.copy_(states)
                    number += 1
                assert number == count, (name, number)
                if turn:  # the first round warms caches, connections and imports
                    rates[name].append(number * size / (time.perf_counter() - started) / 1e9)
    median = {name: statistics.median(found) for name, found in rates.items()}
    print(f"\n{count} samples of {size / 1e6:.0f} MB ({tokens:,} tokens), {len(data.manifest.shards)} shards")
    for name, found in rates.items():
        ratios = (
            f"{median[name] / median['raw read']:5.2f} of raw   {median[name] / median['webdataset']:5.1f} x webdataset"
        )
        print(f"  {name:28} {median[name]:6.2f} GB/s  ({min(found):.2f} to {max(found):.2f})   {ratios}", flush=True)
    return rates


def make_ways(data: ShardSet, buffer: torch.Tensor, url: str) -> dict[str, Way]:
    import datasets
    import safetensors.torch
    import webdataset

    import eagle3_data

    folder = str(data.folder)
    remote = RemoteShardSet.open(url)
    rows = eagle3_data.load_dataset(folder, split="train")
    stream = eagle3_data.load_dataset(folder, split="train", streaming=True)
    plain = datasets.load_dataset(folder, split="train", streaming=True)
    urls = sorted(str(path) for path in (data.folder / "data").glob("*.tar"))

    def raw() -> Iterator[None]:
        view = memoryview(buffer.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
        for path in urls:
            with open(path, "rb", buffering=0) as file:
                while count := file.readinto(view):
                    if count > len(view) // 2:
                        yield None

    def into(table: ShardSet | RemoteShardSet) -> Iterator[None]:
        for i in range(len(table)):
            table.read_into(i, {AUX: buffer})
            yield None

    def plain_datasets() -> Iterator[torch.Tensor]:
        for row in plain:
            yield safetensors.torch.load(row["safetensors"])[AUX]

    def plain_webdataset() -> Iterator[torch.Tensor]:
        for row in webdataset.WebDataset(urls, shardshuffle=False):
            yield safetensors.torch.load(row["safetensors"])[AUX]

    return {
        "raw read": raw,
        "ours, read_into": lambda: into(data),
        "ours, mmap": lambda: (data.read(i, (AUX,))[AUX] for i in range(len(data))),
        "ours, load_dataset rows": lambda: (row[AUX] for row in rows.select_columns([AUX])),
        "ours, load_dataset stream": lambda: (row[AUX] for row in stream.select_columns([AUX])),
        "ours, http": lambda: into(remote),
        "datasets streaming": plain_datasets,
        "webdataset": plain_webdataset,
    }


if __name__ == "__main__":
    main()
