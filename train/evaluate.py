"""Acceptance length of a draft in the real SGLang server, and what it is worth in tokens per second.

The server counts, per request, completion tokens and verifications (`spec_verify_ct`). Reported, over all requests:

    acceptance length   sum of completion tokens / sum of verifications, SGLang's `spec_accept_length`; the target's own
                        token is included, so 1.0 is a useless draft; long answers weigh more, as they do in serving
    accepted per step   sum of accepted draft tokens / sum of verifications
    by position         share of verifications that accepted at least 1, 2, ... draft tokens
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3_data.errors import ConfigError, Eagle3Error, ServerUnfit
from eagle3_data.server.client import Sampling, ServerClient
from eagle3_data.server.command import Device, ServerConfig
from eagle3_data.server.process import ServerProcess
from eagle3_data.train.eval_prompts import EvalPrompt

LOW_DIVERSITY = 0.5
"""An answer whose share of different 4-grams is below this repeats itself, which any draft predicts well."""
NGRAM = 4
WARM_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    target: str
    draft_tokens: int = 3
    """Draft tokens per verification, in a chain."""
    max_new_tokens: int = 256
    concurrency: int = 8
    """Requests in flight; tok/s is for this many."""
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
class Answer:
    """One request's result."""

    prompt: EvalPrompt
    output_ids: tuple[int, ...]
    verifications: int
    accepted: int
    histogram: tuple[int, ...]
    """Entry k: verifications that accepted exactly k draft tokens."""

    @property
    def diversity(self) -> float:
        """Different 4-grams / 4-grams; 1.0 for an answer too short to repeat one."""
        grams = [self.output_ids[i : i + NGRAM] for i in range(len(self.output_ids) - NGRAM + 1)]
        return len(set(grams)) / len(grams) if grams else 1.0


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Sums over some answers."""

    answers: int
    tokens: int
    verifications: int
    acceptance_length: float
    accepted_per_step: float
    by_position: list[float]
    low_diversity: int
    """Answers below `LOW_DIVERSITY`."""

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Acceptance:
        # an answer of one token is made by the prefill alone and says nothing about the draft
        used = [answer for answer in answers if answer.verifications]
        tokens = sum(len(answer.output_ids) for answer in used)
        verifications = sum(answer.verifications for answer in used)
        longest = max((len(answer.histogram) for answer in used), default=0)
        counts = [sum(a.histogram[k] for a in used if k < len(a.histogram)) for k in range(longest)]
        total = sum(counts)
        positions = [sum(counts[k:]) / total for k in range(1, longest)] if total else []
        return cls(
            len(answers),
            tokens,
            verifications,
            tokens / verifications if verifications else 1.0,
            sum(answer.accepted for answer in used) / verifications if verifications else 0.0,
            positions,
            sum(answer.diversity < LOW_DIVERSITY for answer in answers),
        )


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
    tokens_per_s: float
    plain_tokens_per_s: float | None
    """Without the draft, when asked for."""
    equal_answers: int | None
    """Greedy answers equal to those without the draft, when asked for."""
    per_prompt: list[PromptResult]

    @property
    def speedup(self) -> float | None:
        return self.tokens_per_s / self.plain_tokens_per_s if self.plain_tokens_per_s else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "speedup": self.speedup}


@dataclass(frozen=True, slots=True)
class Measured:
    answers: list[Answer]
    tokens_per_s: float


async def measure(
    url: str,
    prompts: Sequence[EvalPrompt],
    config: EvalConfig,
    *,
    expect_draft: bool,
    on_answer: Callable[[int, int], None] | None = None,
) -> Measured:
    """Send all prompts, at most `concurrency` at once.

    Raises ConfigError when there are none, ServerUnfit when a draft is expected and none is used.
    """
    if not prompts:
        raise ConfigError("there is no prompt to measure with", next="--limit of at least 1, or a file with prompts")
    sampling = Sampling(max_new_tokens=config.max_new_tokens, temperature=config.temperature)
    gate, done = asyncio.Semaphore(config.concurrency), 0
    async with ServerClient(url, api_key=config.api_key) as client:
        # a server's first batches compile and allocate; they are not timed
        warm = Sampling(max_new_tokens=min(WARM_TOKENS, config.max_new_tokens), temperature=config.temperature)
        some = [prompt.input_ids[::-1] for prompt in prompts[: config.concurrency]]  # a prefix cache must not know them
        await asyncio.gather(*(client.generate(ids, sampling=warm) for ids in some))

        async def ask(prompt: EvalPrompt) -> Answer:
            nonlocal done
            async with gate:
                reply = await client.generate(prompt.input_ids, sampling=sampling)
            done += 1
            if on_answer is not None:
                on_answer(done, len(prompts))
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
    if expect_draft and not any(answer.verifications for answer in answers):
        raise ServerUnfit(
            f"{url} answered without speculation (no spec_verify_ct in its answers)",
            next="start it with the draft: eagle3-data export prints the command",
        )
    return Measured(answers, sum(len(answer.output_ids) for answer in answers) / max(seconds, 1e-9))


def evaluate_url(
    url: str,
    prompts: Sequence[EvalPrompt],
    config: EvalConfig,
    *,
    draft: str,
    plain: Measured | None = None,
    on_answer: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Measure a server that already decodes with a draft."""
    with_draft = asyncio.run(measure(url, prompts, config, expect_draft=True, on_answer=on_answer))
    return make_report(with_draft, plain, config, draft=draft)


def running_limit(url: str, config: EvalConfig) -> int | None:
    """Requests that a running server takes at once, if that is less than `concurrency`: the rest wait there."""

    async def ask() -> int | None:
        async with ServerClient(url, api_key=config.api_key) as client:
            try:
                states = (await client.server_info()).get("internal_states") or []
            except Eagle3Error:  # some way in between passes on /generate alone; this is a hint, no need
                return None
        limits = [int(n) for state in states if (n := state.get("effective_max_running_requests_per_dp"))]
        return sum(limits) or None

    limit = asyncio.run(ask())
    return limit if limit is not None and limit < config.concurrency else None


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
        return asyncio.run(measure(server.url, prompts, config, expect_draft=False, on_answer=on_answer))


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


def make_report(with_draft: Measured, plain: Measured | None, config: EvalConfig, *, draft: str) -> EvalReport:
    answers = with_draft.answers
    categories = sorted({answer.prompt.category for answer in answers})
    equal = None
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
        tokens_per_s=with_draft.tokens_per_s,
        plain_tokens_per_s=plain.tokens_per_s if plain is not None else None,
        equal_answers=equal,
        per_prompt=[
            PromptResult(a.prompt.id, len(a.output_ids), a.verifications, a.diversity < LOW_DIVERSITY) for a in answers
        ],
    )
