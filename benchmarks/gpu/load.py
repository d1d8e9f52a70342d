"""Load on one server: prompts of one length, so many in flight; with capture, dumps are taken away as they come."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from eagle3_data.protocol import DUMP_SUFFIX, ERROR_SUFFIX
from eagle3_data.server.client import ServerClient

DRAIN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Case:
    """`requests` prompts of `tokens` tokens, `in_flight` at once."""

    tokens: int
    in_flight: int
    requests: int


@dataclass(frozen=True)
class Measured:
    """One pass over a case."""

    tokens_per_s: float
    """Prompt tokens over the time from the first request to the last response."""
    latency_p50_s: float
    latency_p95_s: float
    lag_p50_s: float | None
    """From a response to its dump under its final name."""
    lag_max_s: float | None
    dumps: int
    dump_bytes: int
    errors: dict[str, int]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass
class Taken:
    """What a drain found in the spool."""

    came: dict[str, float] = field(default_factory=dict)
    """Request id -> when its dump was seen under its final name, by the machine's monotonic clock."""
    errors: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def count(self) -> int:
        return len(self.came) + sum(self.errors.values())

    def look(self, spool: Path) -> int:
        """Take away and note what is finished; files found."""
        found = 0
        with os.scandir(spool) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.name.endswith(DUMP_SUFFIX):
                    self.came[entry.name.removesuffix(DUMP_SUFFIX)] = time.monotonic()
                    self.nbytes += entry.stat().st_size
                elif entry.name.endswith(ERROR_SUFFIX):
                    reason = json.loads(Path(entry.path).read_text())["reason"]
                    self.errors[reason] = self.errors.get(reason, 0) + 1
                else:
                    continue
                os.unlink(entry.path)
                found += 1
        return found


def drain(spool: Path, expected: int) -> Taken:
    """Take dumps until all have come, or none has a minute after stdin was closed: all requests were answered then."""
    taken, sent_all = Taken(), threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), sent_all.set()), daemon=True).start()
    deadline = math.inf
    while taken.count < expected and time.monotonic() < deadline:
        if taken.look(spool):
            deadline = math.inf
            continue
        time.sleep(0.002)
        if sent_all.is_set():
            deadline = min(deadline, time.monotonic() + DRAIN_TIMEOUT_S)
    if missing := expected - taken.count:
        taken.errors["never came"] = missing
    return taken


class Draining:
    """`drain` in a process of its own: its work must not delay the load, whose answers and dumps come together."""

    def __init__(self, spool: Path, expected: int) -> None:
        command = [sys.executable, __file__, str(spool), str(expected)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it is at work

    def result(self) -> Taken:
        """Call when all requests were answered. Raises CalledProcessError."""
        out, _ = self._process.communicate()
        if self._process.returncode:
            raise subprocess.CalledProcessError(self._process.returncode, self._process.args)
        return Taken(**json.loads(out))


async def run_case(url: str, case: Case, vocab: int, *, seed: int, run: str, spool: Path | None) -> Measured:
    """All prompts of a case. `spool`: the server captures, and its dumps are taken from there."""
    dice = random.Random(seed)
    prompts = [[dice.randrange(8, vocab) for _ in range(case.tokens)] for _ in range(case.requests)]
    latency, ended = [0.0] * case.requests, [0.0] * case.requests
    todo = iter(range(case.requests))
    draining = Draining(spool, case.requests) if spool is not None else None
    async with ServerClient(url) as client:

        def rid(i: int) -> str:
            return f"e3d-{run}-{i:06d}-0" if spool is not None else f"plain-{run}-{i:06d}"

        async def worker() -> None:
            for i in todo:
                began = time.monotonic()
                await client.prefill(prompts[i], rid(i))
                ended[i] = time.monotonic()
                latency[i] = ended[i] - began

        began = time.monotonic()
        await asyncio.gather(*(worker() for _ in range(case.in_flight)))
        seconds = max(ended) - began
    taken = draining.result() if draining is not None else Taken()
    lags = [max(0.0, taken.came[rid(i)] - ended[i]) for i in range(case.requests) if rid(i) in taken.came]
    return Measured(
        tokens_per_s=case.tokens * case.requests / seconds,
        latency_p50_s=statistics.median(latency),
        latency_p95_s=sorted(latency)[int(0.95 * (case.requests - 1))],
        lag_p50_s=statistics.median(lags) if lags else None,
        lag_max_s=max(lags) if lags else None,
        dumps=len(taken.came),
        dump_bytes=taken.nbytes,
        errors=taken.errors,
    )


if __name__ == "__main__":
    print("ready", flush=True)
    print(json.dumps(asdict(drain(Path(sys.argv[1]), int(sys.argv[2])))))
