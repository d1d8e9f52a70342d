"""Acceptance length of a draft in the real SGLang server, and what it is worth in tokens per second.

A speed-up is a ratio of rounds. Two servers that are up together take turns, and each round is compared with the one
beside it, so that a host that goes up and down does so for both. Servers that are up one after the other are compared
each round with each, which shows how far the ratio may be off.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from eagle3_data.server.command import ServerConfig, resolve_device
from eagle3_data.server.process import ServerProcess
from eagle3_data.train.acceptance import LOW_DIVERSITY, Acceptance
from eagle3_data.train.engines import DRAFT_BACKEND
from eagle3_data.train.eval_prompts import EvalPrompt
from eagle3_data.train.measure import Decoder, EvalConfig, Measured, measure
from eagle3_data.train.serving import Serving


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
    """tok/s of each round."""
    plain_tokens_per_s: float | None
    """Without the draft, when asked for."""
    speedups: list[float]
    """Rates of rounds with the draft over rates of rounds without, see above; empty when not asked for."""
    equal_answers: int | None
    """Greedy answers equal to those without the draft, when asked for."""
    per_prompt: list[PromptResult]

    @property
    def tokens_per_s(self) -> float:
        """Median."""
        return statistics.median(self.rates)

    @property
    def speedup(self) -> float | None:
        """Median."""
        return statistics.median(self.speedups) if self.speedups else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_s": self.tokens_per_s, "speedup": self.speedup}


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
    """As `export` says that the draft is served; the caller's own arguments win."""
    of_draft = Serving.read(draft).sglang_args if draft is not None else ()
    if DRAFT_BACKEND in of_draft and resolve_device(config.device) == "cpu":  # a CPU has one backend for all
        at = of_draft.index(DRAFT_BACKEND)
        of_draft = of_draft[:at] + of_draft[at + 2 :]
    return ServerConfig(
        model=config.target,
        device=config.device,
        tp=config.tp,
        dtype=config.dtype,
        api_key=config.api_key,
        draft=str(draft) if draft is not None else None,
        speculative_steps=config.draft_tokens,
        # with a draft SGLang takes 48 at once unless told; the rest would wait, and the comparison with plain be unfair
        extra_args=(
            *("--disable-radix-cache", "--max-running-requests", str(config.concurrency)),
            *of_draft,
            *config.server_args,
        ),
        python=config.python,
    )


def make_report(
    with_draft: Measured, plain: Measured | None, config: EvalConfig, *, draft: str, took_turns: bool
) -> EvalReport:
    answers = with_draft.answers
    categories = sorted({answer.prompt.category for answer in answers})
    equal, speedups = None, []
    if plain is not None:
        rates = with_draft.rates, plain.rates
        speedups = [rate / beside for rate, beside in (zip(*rates, strict=True) if took_turns else product(*rates))]
        if config.temperature == 0.0:
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
        plain_tokens_per_s=plain.tokens_per_s if plain is not None else None,
        speedups=speedups,
        equal_answers=equal,
        per_prompt=[
            PromptResult(a.prompt.id, len(a.output_ids), a.verifications, a.diversity < LOW_DIVERSITY) for a in answers
        ],
    )
