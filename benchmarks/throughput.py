"""How fast `eagle3-data build` takes dumps that cost nothing: request, match, copy, checksum, shard, seal, manifest.

    python -m benchmarks.throughput [--sizes 135 5] [--gigabytes 4] [--rounds 3] [--where tmpfs disk] [--out FILE]

A server in a process of its own keeps finished dumps of Kimi-K2.5's shape (57,344 bytes per token, bfloat16) in a tmpfs
spool; for each request it writes a new header and the ids into one and links it, so that a dump costs it about a
kilobyte. The builder is what the command runs, with its defaults. It writes into tmpfs and onto disk; `dd` from tmpfs
onto the same file system (`conv=fdatasync` on disk, where every seal of ours is an fsync) runs before and after each
build, and the ratio is to the mean of the two. Into tmpfs, two threads that copy and do nothing else tell what the
machine can. GB/s are 10^9 bytes of shards from the first tenth of a second in which samples were placed (so without the
import of torch) to the last seal. Server and builder share the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.gpu.host import Results
from eagle3_data.capture import CaptureSpec
from eagle3_data.journal import journal_path, read_tail
from eagle3_data.protocol import DUMP_SUFFIX, DumpMeta, dump_tensors, ids_digest, safetensors_header
from tests.models import VOCAB, tiny_model
from tests.replay import ReplayServer

KIMI = CaptureSpec(model="kimi", layers=(1, 29, 57), width=7168, vocab_size=VOCAB)
HEADER_BYTES = 2048
SPOOL_BYTES = 3 << 30
"""All dumps of the pool together; the builder never has more outstanding."""
BLOCK, SOURCE_BYTES = 8 << 20, 512 << 20
"""Of `dd`, and of the file it reads."""
IDLE_S = 6
"""A build has been importing for so long when it writes: by then a virtual machine has given free memory back to its
host, and getting it again costs as much as the copy."""
BUILD = """
import sys
from pathlib import Path
from eagle3_data.builders.build import build
from eagle3_data.builders.pool import FlowConfig
from eagle3_data.builders.settings import BuildConfig
samples, model, server, out = sys.argv[1:]
config = BuildConfig(
    out=Path(out),
    inputs=(samples,),
    model=model,
    servers=(server,),
    interval_s=0.1,
    flow=FlowConfig(max_inflight="auto"),
)
build(config, on_tick=lambda tick: None, on_text=print)
"""


class ReadyServer(ReplayServer):
    """Finished dumps of one length, linked into the spool when they are asked for; a slot is free when unlinked."""

    def __init__(self, spool: Path, spec: CaptureSpec, tokens: int) -> None:
        nbytes = tokens * spec.dump_bytes_per_token
        slots = max(2, min(1024, SPOOL_BYTES // nbytes))
        # a budget of half the high-water mark is the builder's default
        super().__init__(spool, spec, high_water_bytes=2 * slots * nbytes)
        self.tokens = tokens
        self._tensors = dump_tensors(tokens=tokens, num_aux=len(spec.layers), width=spec.width, dtype=spec.dtype)
        bits = np.random.default_rng(0).integers(0, 0x4000, nbytes // 2, dtype=np.uint16)
        states = memoryview(bits).cast("B")
        aux = nbytes * len(spec.layers) // (len(spec.layers) + 1)
        self._checksum = ":".join(xxhash.xxh3_128_hexdigest(part) for part in (states[:aux], states[aux:]))
        self._ids_at = HEADER_BYTES + nbytes
        pool = spool / ".pool"
        pool.mkdir()
        self._slots = []
        for number in range(slots):
            path = pool / str(number)
            with path.open("wb") as file:
                file.seek(HEADER_BYTES)
                file.write(states)
            self._slots.append((path, os.open(path, os.O_RDWR)))

    def dump(self, rid: str, ids: list[int], fault: str) -> None:
        path, slot = self._free()
        meta = DumpMeta(
            rid=rid,
            tokens=len(ids),
            ids_digest=ids_digest(ids),
            layers=self.spec.layers,
            width=self.spec.width,
            dtype=self.spec.dtype,
            norm=self.spec.norm,
            next_token=7,
            finite=True,
            checksum=self._checksum,
            instance=self.instance,
        )
        os.pwrite(slot, safetensors_header(self._tensors, meta.to_strings(), reserve=HEADER_BYTES), 0)
        os.pwrite(slot, np.array(ids, "<i4").tobytes(), self._ids_at)
        os.link(path, self.spool / f"{rid}{DUMP_SUFFIX}")

    def _free(self) -> tuple[Path, int]:
        for _ in self._slots:
            path, slot = self._slots.pop(0)
            self._slots.append((path, slot))
            if os.fstat(slot).st_nlink == 1:
                return path, slot
        raise AssertionError("the builder has more outstanding than its budget")


def serve(spool: Path, tokens: int) -> None:
    """Until standard input ends; the URL is the first line of the output."""
    with ReadyServer(spool, replace(KIMI, model=str(tiny_model("llama"))), tokens) as server:
        print(server.url, flush=True)
        sys.stdin.read()


@contextmanager
def serving(spool: Path, tokens: int) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.throughput", "--serve", str(spool), "--tokens", str(tokens)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait()


def write_samples(path: Path, count: int, tokens: int) -> None:
    chooser = np.random.default_rng(1)
    mask = [0] * (tokens // 2) + [1] * (tokens - tokens // 2)
    with path.open("w") as file:
        for number in range(count):
            ids = chooser.integers(0, VOCAB, tokens).tolist()
            file.write(json.dumps({"id": f"r{number}", "input_ids": ids, "loss_mask": mask}) + "\n")


def dd(source: Path, target: Path, nbytes: int, *, durable: bool) -> float:
    """GB/s of `dd` from a file in tmpfs, read again and again, into one file of `nbytes`; durable at its end."""
    target.unlink(missing_ok=True)
    blocks, each = nbytes // BLOCK, source.stat().st_size // BLOCK
    began = time.perf_counter()
    for at in range(0, blocks, each):
        count = min(each, blocks - at)
        last = at + count >= blocks
        conv = "notrunc,fdatasync" if durable and last else "notrunc"
        command = ["dd", f"if={source}", f"of={target}", f"bs={BLOCK}", f"seek={at}", f"count={count}", f"conv={conv}"]
        subprocess.run([*command, "status=none"], check=True)
    seconds = time.perf_counter() - began
    target.unlink()
    return blocks * BLOCK / seconds / 1e9


def bare(source: Path, folder: Path, nbytes: int) -> float:
    """GB/s of two threads that send a file in tmpfs into two fresh files and do nothing else: what this machine can."""
    size, targets = source.stat().st_size, [folder / f"bare{number}" for number in range(2)]

    def send(target: Path) -> None:
        with source.open("rb") as read, target.open("wb") as write:
            done = 0
            while done < nbytes // 2:
                at = done % size
                done += os.sendfile(write.fileno(), read.fileno(), at, min(BLOCK, size - at))

    began = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(send, targets))
    seconds = time.perf_counter() - began
    for target in targets:
        target.unlink()
    return nbytes / seconds / 1e9


@dataclass(frozen=True)
class Case:
    where: str
    folder: Path
    tokens: int
    count: int


def measure(case: Case, samples: Path, url: str, source: Path) -> dict[str, Any]:
    """One build between two runs of `dd`."""
    out, durable = case.folder / "out", case.where == "disk"
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    nbytes = case.count * case.tokens * KIMI.dump_bytes_per_token
    before = dd(source, case.folder / "dd", nbytes, durable=durable)
    os.sync()
    command = [sys.executable, "-c", BUILD, str(samples), str(tiny_model("llama")), url, str(out)]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    *ticks, last = read_tail(journal_path(out), 1 << 30)
    assert (last.event, last.phase, last.done) == ("end", "finished", case.count), last
    first = next(tick for tick in ticks if tick.done)
    sealed = max(path.stat().st_ctime for path in (out / "data").glob("*.tar"))  # of the rename
    shutil.rmtree(out)
    os.sync()
    most = None
    if case.where == "tmpfs":
        time.sleep(IDLE_S)
        most = bare(source, case.folder, nbytes)
    after = dd(source, case.folder / "dd", nbytes, durable=durable)
    speed = (last.nbytes - first.nbytes) / (sealed - first.t) / 1e9
    return {
        "seconds": sealed - first.t,
        "with_start_s": last.active_s,
        "nbytes": last.nbytes,
        "gb_per_s": speed,
        "dd_gb_per_s": (before + after) / 2,
        "of_dd": speed / ((before + after) / 2),
        **({"bare_gb_per_s": most, "of_bare": speed / most} if most else {}),
        "builder_user_s": now.ru_utime - used.ru_utime,
        "builder_system_s": now.ru_stime - used.ru_stime,
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[135, 5], help="MB of one sample")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of states in one build")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--where", nargs="+", choices=("tmpfs", "disk"), default=["tmpfs", "disk"])
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder in tmpfs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/throughput.json"))
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve, asked.tokens)
        return
    settings = {"sizes": asked.sizes, "gigabytes": asked.gigabytes, "rounds": asked.rounds}
    results = Results(asked.out, "throughput", settings, "cpu")
    with (
        tempfile.TemporaryDirectory(prefix="eagle3-speed-", dir=asked.memory) as memory,
        tempfile.TemporaryDirectory(prefix="eagle3-speed-", dir=asked.disk) as disk,
    ):
        folders = {"tmpfs": Path(memory), "disk": Path(disk)}
        source = Path(memory) / "source"
        with source.open("wb") as file:
            for _ in range(SOURCE_BYTES // BLOCK):
                file.write(os.urandom(BLOCK))
        for megabytes in asked.sizes:
            tokens = round(megabytes * 1e6 / KIMI.dump_bytes_per_token)
            count = max(2, round(asked.gigabytes * 1e9 / tokens / KIMI.dump_bytes_per_token))
            spool, samples = Path(memory) / f"spool-{tokens}", Path(disk) / f"{tokens}.jsonl"
            write_samples(samples, count, tokens)
            with serving(spool, tokens) as url:
                for where in asked.where:
                    case = Case(where, folders[where], tokens, count)
                    rounds = [measure(case, samples, url, source) for _ in range(asked.rounds)]
                    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
                    best = max(one["gb_per_s"] for one in rounds)
                    results.add(where=where, tokens=tokens, samples=count, **medians, best_gb_per_s=best)
            shutil.rmtree(spool)


if __name__ == "__main__":
    main()
