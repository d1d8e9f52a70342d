"""Load on one server: prompts of one length, so many in flight; with capture, dumps are taken away as they come."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
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
class Drain:
    """Takes dumps out of the spool the moment they appear, and notes when that was."""

    spool: Path
    came: dict[str, float] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0

    def look(self) -> int:
        """Files found now; in a thread of its own, since freeing a large file takes milliseconds."""
        found = 0
        with os.scandir(self.spool) as entries:
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

    async def until(self, expected: int, sent_all: asyncio.Event) -> None:
        deadline = None
        while len(self.came) + sum(self.errors.values()) < expected:
            if not await asyncio.to_thread(self.look):
                await asyncio.sleep(0.002)
            if sent_all.is_set():
                deadline = deadline or time.monotonic() + DRAIN_TIMEOUT_S
                if time.monotonic() > deadline:
                    self.errors["never came"] = expected - len(self.came) - sum(self.errors.values())


async def run_case(url: str, case: Case, vocab: int, *, seed: int, run: str, spool: Path | None) -> Measured:
    """All prompts of a case. `spool`: the server captures, and its dumps are taken from there."""
    dice = random.Random(seed)
    prompts = [[dice.randrange(8, vocab) for _ in range(case.tokens)] for _ in range(case.requests)]
    latency, ended = [0.0] * case.requests, [0.0] * case.requests
    todo = iter(range(case.requests))
    drain, sent_all = Drain(spool or Path()), asyncio.Event()
    async with ServerClient(url) as client:

        def rid(i: int) -> str:
            return f"e3d-{run}-{i:06d}-0" if spool is not None else f"plain-{run}-{i:06d}"

        async def worker() -> None:
            for i in todo:
                began = time.monotonic()
                await client.prefill(prompts[i], rid(i))
                ended[i] = time.monotonic()
                latency[i] = ended[i] - began

        draining = asyncio.create_task(drain.until(case.requests, sent_all)) if spool is not None else None
        began = time.monotonic()
        await asyncio.gather(*(worker() for _ in range(case.in_flight)))
        seconds = max(ended) - began
        sent_all.set()
        if draining is not None:
            await draining
    lags = [max(0.0, drain.came[rid(i)] - ended[i]) for i in range(case.requests) if rid(i) in drain.came]
    return Measured(
        tokens_per_s=case.tokens * case.requests / seconds,
        latency_p50_s=statistics.median(latency),
        latency_p95_s=sorted(latency)[int(0.95 * (case.requests - 1))],
        lag_p50_s=statistics.median(lags) if lags else None,
        lag_max_s=max(lags) if lags else None,
        dumps=len(drain.came),
        dump_bytes=drain.nbytes,
        errors=drain.errors,
    )
