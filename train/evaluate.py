"""Acceptance length of a draft in the real SGLang server, and what it is worth in tokens per second.

A speed-up is a ratio of rounds. Two servers that are up together take turns, and each round is compared with the one
beside it, so that a host that goes up and down does so for both. Servers that are up one after the other are compared
each round with each, which shows how far the ratio may be off.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from eagle3_data.errors import ConfigError, ServerUnfit
from eagle3_data.server.client import Sampling, ServerClient
from eagle3_data.server.command import Device, ServerConfig
from eagle3_data.server.process import ServerProcess
from eagle3_data.train.acceptance import LOW_DIVERSITY, Acceptance, Answer
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


@dataclass(frozen=True, slots=True)
class PromptResult:
    """What one prompt gave, to compare drafts prompt by prompt."""

    id: str
    tokens: int
    verifications: int
    repeats: bool
    """Diversity below `LOW_DIVERSITY`."""


@dataclass(frozen=True, slots=True)
class EvalReport:
    draft: str
    target: str
    draft_tokens: int
    temperature: float
    concurrency: int
    overall: Acceptance
    by_category: dict[str, Acceptance]
    diverse_only: Acceptance
    """Without the answers that repeat themselves."""
    rates: list[float]
    """tok/s of each round; `tokens_per_s` is their median."""
    tokens_per_s: float
    plain_tokens_per_s: float | None
    """Without the draft, when asked for."""
    speedups: list[float]
    """Rates of rounds with the draft over rates of rounds without, see above; empty when not asked for."""
    equal_answers: int | None
    """Greedy answers equal to those without the draft, when asked for."""
    per_prompt: list[PromptResult]

    @property
    def speedup(self) -> float | None:
        """Median."""
        return statistics.median(self.speedups) if self.speedups else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "speedup": self.speedup}


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

    Raises ConfigError when there is no prompt or no round, ServerUnfit when a server decodes with a draft or
    without one, and the other was said.
    """
    if not prompts:
        raise ConfigError("there is no prompt to measure with", next="--limit of at least 1, or a file with prompts")
    if config.rounds < 1:
        raise ConfigError(f"{config.rounds} rounds measure nothing", next="--rounds of at least 1")
    done, total = 0, len(prompts) * config.rounds * len(servers)

    def count() -> None:
        nonlocal done
        done += 1
        if on_answer is not None:
            on_answer(done, total)

    results = [Measured([], []) for _ in servers]
    async with AsyncExitStack() as opened:
        clients = [await opened.enter_async_context(ServerClient(one.url, api_key=config.api_key)) for one in servers]
        for client in clients:
            await _warm(client, prompts, config)
        for _ in range(config.rounds):
            for server, client, result in zip(servers, clients, results, strict=True):
                answers, rate = await _round(client, prompts, config, count)
                _check_speculation(server, answers)
                result.rates.append(rate)
                result.answers.extend(answers if len(result.rates) == 1 else ())
    return results


def _check_speculation(server: Decoder, answers: Sequence[Answer]) -> None:
    speculates = any(answer.verifications for answer in answers)
    if server.has_draft and not speculates:
        raise ServerUnfit(
            f"{server.url} answered without speculation (no spec_verify_ct in its answers)",
            next="start it with the draft: eagle3-data export prints the command",
        )
    if speculates and not server.has_draft:
        raise ServerUnfit(
            f"{server.url} is to answer without a draft and decodes with one",
            next="start it without --speculative-algorithm",
        )


async def _warm(client: ServerClient, prompts: Sequence[EvalPrompt], config: EvalConfig) -> None:
    """A server's first batches compile and allocate; they are not timed."""
    warm = Sampling(max_new_tokens=min(WARM_TOKENS, config.max_new_tokens), temperature=config.temperature)
    some = [prompt.input_ids[::-1] for prompt in prompts[: config.concurrency]]  # a prefix cache must not know them
    await asyncio.gather(*(client.generate(ids, sampling=warm) for ids in some))


async def _round(
    client: ServerClient, prompts: Sequence[EvalPrompt], config: EvalConfig, count: Callable[[], None]
) -> tuple[list[Answer], float]:
    """Every prompt once: (answers, tok/s)."""
    sampling = Sampling(max_new_tokens=config.max_new_tokens, temperature=config.temperature)
    gate = asyncio.Semaphore(config.concurrency)

    async def ask(prompt: EvalPrompt) -> Answer:
        async with gate:
            reply = await client.generate(prompt.input_ids, sampling=sampling)
        count()
        meta = reply.meta
        return Answer(
            prompt,
            reply.output_ids,
            int(meta.get("spec_verify_ct", 0)),
            int(meta.get("spec_num_correct_drafts", meta.get("spec_accept_token_num", 0))),
            tuple(meta.get("spec_correct_drafts_histogram", meta.get("spec_accept_histogram", ()))),
        )

    began = time.monotonic()
    answers = list(await asyncio.gather(*(ask(prompt) for prompt in prompts)))
    seconds = time.monotonic() - began
    return answers, sum(len(answer.output_ids) for answer in answers) / max(seconds, 1e-9)


def evaluate_url(
    url: str,
    prompts: Sequence[EvalPrompt],
    config: EvalConfig,
    *,
    draft: str,
    plain: Measured | None = None,
    on_answer: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Measure a server that already decodes with a draft; `plain` was measured before."""
    (with_draft,) = asyncio.run(measure([Decoder(url, True)], prompts, config, on_answer=on_answer))
    return make_report(with_draft, plain, config, draft=draft, took_turns=False)


def evaluate_beside(
    url: str,
    plain_url: str,
    prompts: Sequence[EvalPrompt],
    config: EvalConfig,
    *,
    draft: str,
    on_answer: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Measure two running servers in turn, one with a draft and one without."""
    both = [Decoder(url, True), Decoder(plain_url, False)]
    with_draft, plain = asyncio.run(measure(both, prompts, config, on_answer=on_answer))
    return make_report(with_draft, plain, config, draft=draft, took_turns=True)


def evaluate_draft(
    draft: Path,
    prompts: Sequence[EvalPrompt],
    config: EvalConfig,
    *,
    plain: Measured | None = None,
    log: Path | None = None,
    on_start: Callable[[float, str], None] | None = None,
    on_answer: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Start SGLang with the exported draft, measure, stop it."""
    with ServerProcess(server_config(config, draft), log=log, on_progress=on_start) as server:
        return evaluate_url(server.url, prompts, config, draft=str(draft), plain=plain, on_answer=on_answer)


def measure_plain(
    prompts: Sequence[EvalPrompt],
    config: EvalConfig,
    *,
    log: Path | None = None,
    on_start: Callable[[float, str], None] | None = None,
    on_answer: Callable[[int, int], None] | None = None,
) -> Measured:
    """The same prompts on a server without a draft."""
    with ServerProcess(server_config(config, None), log=log, on_progress=on_start) as server:
        (plain,) = asyncio.run(measure([Decoder(server.url, False)], prompts, config, on_answer=on_answer))
        return plain


def server_config(config: EvalConfig, draft: Path | None) -> ServerConfig:
    return ServerConfig(
        model=config.target,
        device=config.device,
        tp=config.tp,
        dtype=config.dtype,
        api_key=config.api_key,
        draft=str(draft) if draft is not None else None,
        speculative_steps=config.draft_tokens,
        # with a draft SGLang takes 48 at once unless told; the rest would wait, and the comparison with plain be unfair
        extra_args=("--disable-radix-cache", "--max-running-requests", str(config.concurrency), *config.server_args),
        python=config.python,
    )


def make_report(
    with_draft: Measured, plain: Measured | None, config: EvalConfig, *, draft: str, took_turns: bool
) -> EvalReport:
    answers = with_draft.answers
    categories = sorted({answer.prompt.category for answer in answers})
    equal, speedups = None, []
    if plain is not None:
        pairs = (
            zip(with_draft.rates, plain.rates, strict=True) if took_turns else product(with_draft.rates, plain.rates)
        )
        speedups = [rate / beside for rate, beside in pairs]
    if plain is not None and config.temperature == 0.0:
        equal = sum(a.output_ids == b.output_ids for a, b in zip(answers, plain.answers, strict=True))
    return EvalReport(
        draft=draft,
        target=config.target,
        draft_tokens=config.draft_tokens,
        temperature=config.temperature,
        concurrency=config.concurrency,
        overall=Acceptance.of(answers),
        by_category={name: Acceptance.of([a for a in answers if a.prompt.category == name]) for name in categories},
        diverse_only=Acceptance.of([answer for answer in answers if answer.diversity >= LOW_DIVERSITY]),
        rates=with_draft.rates,
        tokens_per_s=with_draft.tokens_per_s,
        plain_tokens_per_s=plain.tokens_per_s if plain is not None else None,
        speedups=speedups,
        equal_answers=equal,
        per_prompt=[
            PromptResult(a.prompt.id, len(a.output_ids), a.verifications, a.diversity < LOW_DIVERSITY) for a in answers
        ],
    )
