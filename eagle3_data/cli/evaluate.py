"""`eagle3-data evaluate`: drafts in the real server, one after another, and against each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, get_args

import typer
from rich.console import Console
from rich.table import Table

from eagle3_data import durable
from eagle3_data.cli.train import open_samples, say
from eagle3_data.errors import ConfigError

if TYPE_CHECKING:
    from eagle3_data.train.compare import Compared
    from eagle3_data.train.evaluate import EvalReport

console = Console()
OptionalPath = Optional[Path]  # noqa: UP045 - typer evaluates annotations on Python 3.10
OptionalText = Optional[str]  # noqa: UP045
OptionalInt = Optional[int]  # noqa: UP045


def evaluate_command(
    context: typer.Context,
    draft: Annotated[list[Path], typer.Option(help="Exported draft (SGLang); repeat to compare several.")],
    target: Annotated[str, typer.Option(help="The target: folder or hub id.")],
    prompts: Annotated[OptionalPath, typer.Option(help="JSONL with prompt or messages, and category.")] = None,
    data: Annotated[OptionalPath, typer.Option(help="Instead: the held-out samples of a build or mirror.")] = None,
    run: Annotated[OptionalPath, typer.Option(help="With --data: the run whose held-out share it is.")] = None,
    url: Annotated[OptionalText, typer.Option(help="A running server with the draft; none is started.")] = None,
    baseline_url: Annotated[OptionalText, typer.Option(help="With --url: one without; the two take turns.")] = None,
    limit: Annotated[OptionalInt, typer.Option(help="Use the first N prompts.")] = None,
    draft_tokens: Annotated[int, typer.Option(help="Draft tokens per step.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 8,
    rounds: Annotated[int, typer.Option(help="How often the prompts are sent, for tok/s and its spread.")] = 1,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    baseline: Annotated[bool, typer.Option(help="Also measure without the draft.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="SGLang's --dtype.")] = "auto",
    tp: Annotated[int, typer.Option(help="GPUs for tensor parallelism.")] = 1,
    python: Annotated[str, typer.Option(help="Interpreter that has SGLang.")] = sys.executable,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the checkpoint's own code, in SGLang, too.")] = False,
    log: Annotated[OptionalPath, typer.Option(help="Where SGLang's output goes.")] = None,
    out: Annotated[OptionalPath, typer.Option(help="Write the report as JSON.")] = None,
) -> None:
    """Measure a draft's acceptance length in the real SGLang server, which this command starts.

    Several drafts are measured in turn on the same prompts and compared. What follows `--` goes to SGLang as it is,
    with and without a draft.

    Example: eagle3-data evaluate --draft draft --target Qwen/Qwen3-8B --prompts prompts.jsonl --baseline --rounds 3
    """
    from eagle3_data.server.command import Device
    from eagle3_data.train.compare import compare
    from eagle3_data.train.eval_hints import hints
    from eagle3_data.train.evaluate import evaluate_beside, evaluate_draft, evaluate_url, measure_plain
    from eagle3_data.train.measure import EvalConfig

    if device not in get_args(Device):
        raise ConfigError(f"--device {device!r} is not one of {', '.join(get_args(Device))}")
    if (prompts is None) == (data is None):
        raise ConfigError("give either --prompts or --data")
    if url is not None and len(draft) > 1:
        raise ConfigError(
            "--url is one server with one draft", next="leave --url out: a server is started for each draft in turn"
        )
    if url is not None and baseline:
        raise ConfigError("--url starts no server, so none without the draft", next="--baseline-url: one that runs")
    if url is not None and baseline_url is not None and url.rstrip("/") == baseline_url.rstrip("/"):
        raise ConfigError("--url and --baseline-url are one server", next="name two: with the draft, and without")
    if baseline_url is not None and url is None:
        raise ConfigError("--baseline-url goes with --url", next="--baseline starts a server without the draft")
    if url is not None and context.args:
        raise ConfigError(f"{context.args[0]} is for a server, and --url starts none", next="start the server with it")
    config = EvalConfig(
        target=target,
        draft_tokens=draft_tokens,
        max_new_tokens=max_new_tokens,
        concurrency=concurrency,
        rounds=rounds,
        temperature=temperature,
        device=device,  # type: ignore[arg-type]
        tp=tp,
        dtype=dtype,
        server_args=(*(("--trust-remote-code",) if trust_remote_code else ()), *context.args),
        python=python,
    )
    chosen = _prompts(prompts, data, run, target, trust_remote_code, limit)
    for running in filter(None, (url, baseline_url)):
        for hint in hints(running, config):
            say(hint)
    plain = None
    if baseline:
        say("measuring the target without a draft")
        plain = measure_plain(chosen, config, log=log, on_answer=_count)
    reports: list[EvalReport] = []
    for folder in draft:
        say(f"measuring {folder}")
        name = str(folder)
        if url is not None and baseline_url is not None:
            report = evaluate_beside(url, baseline_url, chosen, config, draft=name, on_answer=_count)
        elif url is not None:
            report = evaluate_url(url, chosen, config, draft=name, on_answer=_count)
        else:
            report = evaluate_draft(folder, chosen, config, plain=plain, log=log, on_answer=_count)
        reports.append(report)
        show_report(report)
        if out is not None:  # after each: a later draft that its server does not load costs no measurement
            out.parent.mkdir(parents=True, exist_ok=True)
            durable.write_text(out, json.dumps([one.to_dict() for one in reports], indent=1) + "\n")
    if len(reports) > 1:
        show_comparison(compare(reports))


def _prompts(
    prompts: Path | None, data: Path | None, run: Path | None, target: str, trust_remote_code: bool, limit: int | None
) -> Any:
    from eagle3_data.train.eval_prompts import heldout_prompts, read_prompts

    if prompts is not None:
        return read_prompts(prompts, target, trust_remote_code=trust_remote_code, limit=limit)
    assert data is not None
    from eagle3_data.train.config import load_config
    from eagle3_data.train.plan import split_samples

    with open_samples(data, ()) as opened:
        if run is None:
            samples = list(range(len(opened)))
        else:
            settings = load_config(run / "config.yaml")
            split = split_samples(opened.keys, opened.tokens, settings.data, seed=settings.optim.seed)
            samples = split.holdout.tolist()
        return heldout_prompts(opened, samples, limit=limit)


def _count(done: int, total: int) -> None:
    if done == total or done % max(1, total // 10) == 0:
        say(f"  {done}/{total} answers")


def show_report(report: EvalReport) -> None:
    """The report as a table: one row per category, then all."""
    table = Table(title=f"{report.draft} on {report.target}, {report.draft_tokens} draft tokens", title_justify="left")
    for name in ("prompts", "answers", "tokens", "acceptance length", "accepted by position", "repeating"):
        table.add_column(name, justify="left" if name == "prompts" else "right")
    rows = [*report.by_category.items()] if len(report.by_category) > 1 else []
    for name, part in [*rows, ("all", report.overall), ("all, without repeating ones", report.diverse_only)]:
        positions = " ".join(f"{share:.2f}" for share in part.by_position)
        length = f"{part.acceptance_length:.2f}"
        table.add_row(name, f"{part.answers}", f"{part.tokens:,}", length, positions, f"{part.low_diversity}")
    console.print(table, highlight=False, markup=False)
    line, rounds = f"{report.tokens_per_s:,.1f} tok/s", len(report.rates)
    if rounds > 1:
        line += f" ({min(report.rates):,.1f} to {max(report.rates):,.1f} over {rounds} rounds)"
    line += f" with the draft at {report.concurrency} in flight"
    if report.plain_tokens_per_s is not None:
        line += f", {report.plain_tokens_per_s:,.1f} without: {report.speedup:.2f}x"
        if rounds > 1:
            line += f" ({min(report.speedups):.2f} to {max(report.speedups):.2f})"
        else:
            line += " (one round; --rounds 3 tells how far it goes up and down)"
    if report.equal_answers is not None:
        line += f"; {report.equal_answers} of {report.overall.answers} greedy answers equal"
    say(line)
    if report.overall.low_diversity * 5 > report.overall.answers:
        say("warning: more than a fifth of the answers repeat themselves; the acceptance length is flattered by them")


def show_comparison(rows: list[Compared]) -> None:
    """One row per draft, the longest accepted first; differences to the draft that was named first."""
    table = Table(title=f"{len(rows)} drafts on {rows[0].prompts} prompts without repeating answers")
    for name in ("draft", "acceptance length", "difference", "95 %", "tok/s", "repeating"):
        table.add_column(name, justify="left" if name == "draft" else "right")
    for row in sorted(rows, key=lambda row: -row.acceptance_length):
        interval = f"{row.interval[0]:+.2f} .. {row.interval[1]:+.2f}" if row is not rows[0] else ""
        difference = f"{row.difference:+.2f}" if row is not rows[0] else "first"
        length = f"{row.acceptance_length:.2f}"
        table.add_row(row.draft, length, difference, interval, f"{row.tokens_per_s:,.1f}", f"{row.repeating}")
    console.print(table, highlight=False, markup=False)
    alike = [row.draft for row in rows[1:] if not row.distinct]
    if alike:
        say(f"not told apart from {rows[0].draft} by these prompts: {', '.join(alike)}")
