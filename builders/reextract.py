"""`verify --against URL`: some samples once more through a server, beside what is stored."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from eagle3_data.builders.connect import make_pool, probe
from eagle3_data.builders.dumps import Dump, Request
from eagle3_data.builders.pool import FlowConfig, Server
from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import ConfigError, Eagle3Error
from eagle3_data.patience import Patience, Tries
from eagle3_data.protocol import AUX, DTYPE_BYTES, IDS, LAST, RequestId
from eagle3_data.shards.table import SampleTable

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.02}
"""Largest ||new - stored|| / ||stored|| of one token's state: batch and kernel change the low bits, never more."""
FP8_TOLERANCE = 0.08
TRIES = 4
"""Requests for one sample, until one gets through."""
PATIENCE = Patience(first_s=0.5, longest_s=8.0, total_s=600.0)


@dataclass(slots=True)
class Comparison:
    """What came of it. `worst`: largest relative difference of one token's state, and where."""

    samples: int = 0
    equal: int = 0
    worst: float = 0.0
    worst_at: str = ""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"re-extracted {self.samples:,} samples: {self.equal:,} bit-equal, largest difference of a token's state "
            f"{self.worst:.2g}{f' ({self.worst_at})' if self.worst_at else ''}"
        )


def reextract(
    data: SampleTable, url: str, count: int, *, api_key: str | None, on_sample: Callable[[], None] = lambda: None
) -> Comparison:
    """Prefill `count` samples (chosen by the content, the same each time) at `url` and compare their states.

    A passing fault of the server is tried again a few times; it says nothing about the data. Raises ServerError or
    ServerUnfit when the server is not there or not of this data's target, ConfigError for a count below 1.
    """
    if count < 1:
        raise ConfigError(f"{count} samples to capture again; at least 1 is needed")
    return asyncio.run(_reextract(data, url, count, api_key, on_sample))


async def _reextract(
    data: SampleTable, url: str, count: int, api_key: str | None, on_sample: Callable[[], None]
) -> Comparison:
    chosen = random.Random(data.fingerprint).sample(range(len(data)), min(count, len(data)))
    result, run = Comparison(), secrets.token_hex(4)
    (probed,) = await probe((url,), api_key)
    try:
        with tempfile.TemporaryDirectory(prefix="eagle3-verify-") as scratch:
            pool = make_pool([probed], data.capture, FlowConfig(), "identity", Path(scratch))
            for number, row in enumerate(sorted(chosen)):
                ids = (await asyncio.to_thread(data.read, row, (IDS,)))[IDS].tolist()
                requests = [Request(RequestId(run, data.keys[row], TRIES * number + i), ids) for i in range(TRIES)]
                await _compare_patiently(data, row, requests, pool.servers[0], result)
                result.samples += 1
                on_sample()
    finally:
        await probed.client.close()
    return result


async def _compare_patiently(
    data: SampleTable, row: int, requests: list[Request], server: Server, result: Comparison
) -> None:
    """One request after another, until one gets through: each under a name of its own."""
    tries = Tries(PATIENCE)
    for number, request in enumerate(requests, 1):
        try:
            await _compare(data, row, request, server, result)
            return
        except Eagle3Error as error:
            wait = tries.next_wait(None) if error.retryable and number < len(requests) else None
            if wait is None:
                again = f" ({number} tries)" if error.retryable else ""
                result.problems.append(f"sample {data.keys[row]}: not compared{again}: {error.message}")
                return
        await asyncio.sleep(wait)


async def _compare(data: SampleTable, row: int, request: Request, server: Server, result: Comparison) -> None:
    server.matcher.sent(request)
    came = False
    try:
        await server.client.prefill(request.input_ids, str(request.rid))
        with await server.matcher.take(request, 60.0) as dump:
            came = True
            new = await asyncio.to_thread(read_states, dump, data.capture, request.tokens)
    finally:
        await server.matcher.drop(request, came=came)
    columns = [name for name in (AUX, LAST) if name in data.columns]
    stored = await asyncio.to_thread(data.read, row, columns)
    result.equal += all(torch.equal(stored[name], new[name]) for name in columns)
    for name in columns:
        spec = data.capture
        encoding = spec.aux_encoding if name == AUX else spec.last_encoding
        limit = FP8_TOLERANCE if encoding == "fp8" else TOLERANCE[spec.dtype]
        old_TGW = stored[name].float().view(request.tokens, -1, spec.width)
        gap = (new[name].float().view_as(old_TGW) - old_TGW).norm(dim=-1) / old_TGW.norm(dim=-1).clamp_min(1e-30)
        worst = float(gap.max())
        if worst > result.worst:
            token = int(gap.amax(-1).argmax())
            result.worst, result.worst_at = worst, f"{data.keys[row]}, {name}, token {token}"
        if worst > limit:
            result.problems.append(
                f"sample {data.keys[row]}: {name} differs by {worst:.2g} of its norm, {limit} is allowed"
            )


def read_states(dump: Dump, spec: CaptureSpec, tokens: int) -> dict[str, torch.Tensor]:
    """aux [T, L*W] and last [T, W] of an open dump."""
    row, dtype = spec.width * DTYPE_BYTES[spec.dtype], getattr(torch, spec.dtype)
    found, at = {}, dump.states_at
    for name, states in ((AUX, len(spec.layers)), (LAST, 1)):
        data = bytearray(os.pread(dump.fd, tokens * states * row, at))
        at += len(data)
        found[name] = torch.frombuffer(data, dtype=dtype).view(tokens, states * spec.width)
    return found
