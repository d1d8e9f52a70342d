"""Sending the same prompts to running servers that decode, in rounds, with what the answers say of speculation."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from eagle3_data.errors import ConfigError, ServerUnfit
from eagle3_data.server.client import Sampling, ServerClient
from eagle3_data.server.command import Device
from eagle3_data.train.acceptance import Answer
from eagle3_data.train.eval_prompts import EvalPrompt

WARM_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    target: str
    draft_tokens: int = 3
    """Draft tokens per verification, in a chain."""
    max_new_tokens: int = 256
    concurrency: int = 8
    """Requests in flight; tok/s is for this many."""
    rounds: int = 1
    """How often the prompts are sent for tok/s; the answers are those of the first."""
    temperature: float = 0.0
    device: Device = "auto"
    tp: int = 1
    dtype: str = "auto"
    server_args: tuple[str, ...] = ()
    """More SGLang arguments, for both servers."""
    python: str = sys.executable
    """Interpreter that has SGLang."""
    api_key: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError, before any server is started."""
        for name, least in (("rounds", 1), ("concurrency", 1), ("max_new_tokens", 2)):  # the prefill makes the first
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise ConfigError(f"{getattr(self, name)} {name} measure nothing", next=f"--{flag} of at least {least}")


@dataclass(frozen=True, slots=True)
class Decoder:
    """A running server that is measured."""

    url: str
    has_draft: bool


@dataclass(frozen=True, slots=True)
class Measured:
    answers: list[Answer]
    """Of the first round."""
    rates: list[float]
    """tok/s of each round."""

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(self.rates)


async def measure(
    servers: Sequence[Decoder],
    prompts: Sequence[EvalPrompt],
    config: EvalConfig,
    *,
    on_answer: Callable[[int, int], None] | None = None,
) -> list[Measured]:
    """Send all prompts, at most `concurrency` at once, `rounds` times to each server; the servers take turns.

    Raises ConfigError when there is no prompt, ServerUnfit when a server decodes with a draft or
    without one, and the other was said.
    """
    if not prompts:
        raise ConfigError("there is no prompt to measure with", next="--limit of at least 1, or a file with prompts")
    done, total = 0, len(prompts) * config.rounds * len(servers)

    def count() -> None:
        nonlocal done
        done += 1
        if on_answer is not None:
            on_answer(done, total)

    async with AsyncExitStack() as opened:
        clients = [await opened.enter_async_context(ServerClient(one.url, api_key=config.api_key)) for one in servers]
        for server, client in zip(servers, clients, strict=True):
            _check_speculation(server, await _warm(client, prompts, config))
        rounds = [
            [
                await _round(server, client, prompts, config, count)
                for server, client in zip(servers, clients, strict=True)
            ]
            for _ in range(config.rounds)
        ]
    return [Measured(turns[0][0], [rate for _, rate in turns]) for turns in zip(*rounds, strict=True)]


def _check_speculation(server: Decoder, answers: Sequence[Answer]) -> None:
    speculates = any(answer.verifications for answer in answers)
    if server.has_draft and not speculates and any(len(answer.output_ids) > 1 for answer in answers):
        raise ServerUnfit(
            f"{server.url} answered without speculation (no spec_verify_ct in its answers)",
            next="start it with the draft: eagle3-data export prints the command",
        )
    if speculates and not server.has_draft:
        raise ServerUnfit(
            f"{server.url} is to answer without a draft and decodes with one",
            next="start it without --speculative-algorithm",
        )


async def _warm(client: ServerClient, prompts: Sequence[EvalPrompt], config: EvalConfig) -> list[Answer]:
    """A server's first batches compile and allocate; they are not timed."""
    warm = Sampling(max_new_tokens=min(WARM_TOKENS, config.max_new_tokens), temperature=config.temperature)
    # a prefix cache must not know them
    some = [replace(prompt, input_ids=prompt.input_ids[::-1]) for prompt in prompts[: config.concurrency]]
    return list(await asyncio.gather(*(_ask(client, prompt, warm) for prompt in some)))


async def _ask(client: ServerClient, prompt: EvalPrompt, sampling: Sampling) -> Answer:
    reply = await client.generate(prompt.input_ids, sampling=sampling)
    meta = reply.meta
    return Answer(
        prompt,
        reply.output_ids,
        int(meta.get("spec_verify_ct", 0)),
        int(meta.get("spec_num_correct_drafts", meta.get("spec_accept_token_num", 0))),
        tuple(meta.get("spec_correct_drafts_histogram", meta.get("spec_accept_histogram", ()))),
    )


async def _round(
    server: Decoder,
    client: ServerClient,
    prompts: Sequence[EvalPrompt],
    config: EvalConfig,
    count: Callable[[], None],
) -> tuple[list[Answer], float]:
    """Every prompt once: (answers, tok/s)."""
    sampling = Sampling(max_new_tokens=config.max_new_tokens, temperature=config.temperature)
    gate = asyncio.Semaphore(config.concurrency)

    async def ask(prompt: EvalPrompt) -> Answer:
        async with gate:
            answer = await _ask(client, prompt, sampling)
        count()
        return answer

    began = time.monotonic()
    answers = list(await asyncio.gather(*(ask(prompt) for prompt in prompts)))
    seconds = time.monotonic() - began
    _check_speculation(server, answers)
    return answers, sum(len(answer.output_ids) for answer in answers) / max(seconds, 1e-9)
