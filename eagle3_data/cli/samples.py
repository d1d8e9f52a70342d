"""`eagle3-data samples` and `synth`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from eagle3_data.builders.samples import SampleSpec, SampleStore, load_tokenizer, prepare_samples
from eagle3_data.builders.samples.audit import write_audit
from eagle3_data.builders.samples.encode import Encoder, make_encoder
from eagle3_data.builders.samples.show import headline, report_lines, runs
from eagle3_data.builders.samples.store import Sample
from eagle3_data.builders.synth import SynthReport, SynthSpec, greedy_share, synthesise
from eagle3_data.cli.progress import console, say
from eagle3_data.errors import ConfigError
from eagle3_data.server.client import ServerClient

LINE_S = 30.0
"""Without a terminal: one line of progress per this many seconds."""

ApiKey = Annotated[
    str | None, typer.Option(help="The server's API key.", envvar="EAGLE3_DATA_API_KEY", show_default=False)
]
TemplateKwargs = Annotated[
    str, typer.Option(help='Variables for the template, as JSON: \'{"reasoning_effort": "high"}\'.')
]


def samples_command(
    inputs: Annotated[list[str], typer.Argument(help="JSONL, JSON or Parquet files, `datasets` names, or one .arrow.")],
    model: Annotated[str, typer.Option(help="The target (folder or hub id): its tokenizer and template are used.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the samples (.arrow); none: only look at them.")
    ] = None,
    show: Annotated[int, typer.Option(help="Print this many samples with what is learnt in colour.")] = 0,
    audit: Annotated[Path | None, typer.Option(help="Write an HTML page about the samples.")] = None,
    loss: Annotated[str, typer.Option(help="'all-assistant' or 'last-turn'.")] = "all-assistant",
    alignment: Annotated[str, typer.Option(help="Rows to train by default: 'strict', 'input' or 'legacy'.")] = "strict",
    thinking: Annotated[str, typer.Option(help="'auto', 'on', 'off' or 'template'.")] = "auto",
    reasoning: Annotated[str, typer.Option(help="Reasoning: in the 'loss', as 'context', or 'drop'.")] = "loss",
    max_tokens: Annotated[int | None, typer.Option(help="Longest sample in tokens.")] = None,
    truncation: Annotated[str, typer.Option(help="Longer samples: 'drop', or 'cut' at a turn's end.")] = "drop",
    dedupe: Annotated[str, typer.Option(help="Equal samples: 'keep-first' or 'keep-all'.")] = "keep-first",
    tool_schemas: Annotated[
        str, typer.Option(help="Tools as dumped by 'sglang', 'sglang-0.5.14', or 'given'.")
    ] = "sglang",
    template_kwargs: TemplateKwargs = "{}",
    workers: Annotated[int, typer.Option(help="Processes; 0: one per core.")] = 0,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the tokenizer's own code (Kimi needs it).")] = False,
) -> None:
    """Conversations to token ids and loss masks; look at them before any GPU works on them.

    Example: eagle3-data samples chats.jsonl --model Qwen/Qwen3-8B --show 3 --audit audit.html --out samples.arrow
    """
    spec = SampleSpec(
        loss=loss,  # type: ignore[arg-type]
        alignment=alignment,  # type: ignore[arg-type]
        thinking=thinking,  # type: ignore[arg-type]
        reasoning=reasoning,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        truncation=truncation,  # type: ignore[arg-type]
        dedupe=dedupe,  # type: ignore[arg-type]
        tool_schemas=tool_schemas,  # type: ignore[arg-type]
        template_kwargs=parse_kwargs(template_kwargs),
    )
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="eagle3-samples-") as scratch:
        path = Path(inputs[0]) if inputs[0].endswith(".arrow") else out or Path(scratch) / "samples.arrow"
        if not inputs[0].endswith(".arrow"):
            source: Any = model if trust_remote_code else tokenizer
            with SampleProgress() as progress:
                prepare_samples(
                    inputs,
                    source,
                    spec,
                    path,
                    workers=workers or os.cpu_count() or 1,
                    progress=progress,
                    trust_remote_code=trust_remote_code,
                )
        store = SampleStore.open(path)
        for line in report_lines(store.report):
            say(line)
        encoder = make_encoder(tokenizer)
        for index in range(min(show, len(store))):
            print_sample(store.row(index), encoder)
        if audit is not None:
            write_audit(store, encoder, audit)
            say(f"audit     {audit}")
        if out is not None:
            say(f"written   {out}")


def synth_command(
    prompts: Annotated[list[str], typer.Option(help="Prompts or conversations (JSONL, JSON, Parquet); repeatable.")],
    server: Annotated[list[str], typer.Option(help="URL of an SGLang server with the target; repeat for several.")],
    out: Annotated[
        Path | None, typer.Option(help="Answers (JSONL). The same command goes on where it stopped.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The target; default: what the server says it has loaded.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(help="0: the target's own choice at every step.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="-1: no limit.")] = -1,
    seed: Annotated[int | None, typer.Option(help="Row i is asked for with seed + i.")] = None,
    thinking: Annotated[str, typer.Option(help="'template', 'on', 'off' or 'auto'.")] = "template",
    truncated: Annotated[str, typer.Option(help="Answers at the token limit: 'keep' or 'drop'.")] = "keep",
    template_kwargs: TemplateKwargs = "{}",
    in_flight: Annotated[int, typer.Option(help="Requests in flight.")] = 64,
    limit: Annotated[int | None, typer.Option(help="Only the first rows.")] = None,
    greedy: Annotated[
        bool,
        typer.Option(
            "--greedy-share", help="Ask for nothing: say how much of PROMPTS' answers the target would choose."
        ),
    ] = False,
    api_key: ApiKey = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the tokenizer's own code (Kimi needs it).")] = False,
) -> None:
    """Have the target itself answer prompts; ids are kept as they were served.

    Example: eagle3-data synth --prompts prompts.jsonl --server http://127.0.0.1:30000 --out answers.jsonl
    """
    model = model or asyncio.run(served_model(server[0], api_key))
    if greedy:
        report_greedy(prompts, model, server, limit, api_key, trust_remote_code)
        return
    if out is None:
        raise ConfigError("--out is missing", next="name the file for the answers: --out answers.jsonl")
    spec = SynthSpec(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=max_new_tokens,
        seed=seed,
        thinking=thinking,  # type: ignore[arg-type]
        truncated=truncated,  # type: ignore[arg-type]
        template_kwargs=parse_kwargs(template_kwargs),
    )
    with SynthProgress() as progress:
        report = synthesise(
            prompts,
            model,
            spec,
            server,
            out,
            in_flight=in_flight,
            limit=limit,
            api_key=api_key,
            progress=progress,
            trust_remote_code=trust_remote_code,
        )
    print_synth(report, out)
    if report.interrupted:
        say("interrupted: finished answers are kept; the same command goes on from here")
        sys.exit(130)


def report_greedy(
    inputs: list[str], model: str, servers: list[str], limit: int | None, api_key: str | None, trust_remote_code: bool
) -> None:
    with tempfile.TemporaryDirectory(prefix="eagle3-greedy-") as scratch:
        path = Path(scratch) / "samples.arrow"
        prepare_samples(inputs, model, SampleSpec(), path, trust_remote_code=trust_remote_code)
        store = SampleStore.open(path)
        rows = (store.row(index) for index in range(len(store) if limit is None else min(limit, len(store))))
        found = greedy_share(rows, servers, api_key=api_key)
    say(
        f"greedy share {found.share:.1%}: the target would itself choose {found.equal:,} of {found.positions:,} answer "
        f"tokens in {found.samples:,} samples"
    )


async def served_model(url: str, api_key: str | None) -> str:
    """The tokenizer path that the server was started with."""
    async with ServerClient(url, api_key=api_key) as client:
        info = await client.server_info()
    found = info.get("tokenizer_path") or info.get("model_path")
    if not isinstance(found, str):
        raise ConfigError(f"{url} does not say which model it has loaded", next="name it with --model")
    return found


def parse_kwargs(text: str) -> dict[str, Any]:
    """Raises ConfigError unless the text is a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--template-kwargs is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("--template-kwargs must be a JSON object")
    return value


def print_sample(sample: Sample, encoder: Encoder) -> None:
    """One sample: learnt text in green, context dim."""
    console.rule(headline(sample), align="left")
    text = Text()
    for run in runs(sample, encoder):
        text.append(run.text, style="bold green" if run.learnt else "dim")
    console.print(text, soft_wrap=True, highlight=False)


def print_synth(report: SynthReport, out: Path) -> None:
    table = Table(box=None, show_header=False)
    table.add_row("planned", f"{report.planned:,}")
    table.add_row("saved", f"{report.saved:,} ({report.truncated:,} reached the token limit)")
    table.add_row("skipped", f"{report.skipped:,} answered before")
    for reason, count in report.failed.most_common():
        table.add_row("failed", f"{count:,} {reason} (see {out.with_suffix('.errors.jsonl').name})")
    table.add_row("tokens", f"{report.output_tokens:,} generated, {report.tokens_per_s:,.0f} tok/s")
    table.add_row("answers", str(out))
    console.print(table, highlight=False)


class SampleProgress:
    """Rows, samples and tokens while they are prepared: a bar on a terminal, lines elsewhere."""

    def __init__(self) -> None:
        columns = (TextColumn("samples"), BarColumn(), TextColumn("{task.fields[line]}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("samples", total=None, line="")
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> SampleProgress:
        if console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, rows: int, samples: int, tokens: int) -> None:
        now = time.monotonic()
        seconds = max(now - self._started, 1e-9)
        line = f"{rows:,} rows, {samples:,} samples, {tokens:,} tokens, {samples / seconds:,.0f} samples/s"
        self._bar.update(self._task, line=line)
        if not console.is_terminal and now - self._shown >= LINE_S:
            self._shown = now
            say(line)


class SynthProgress:
    """Answers while they come: tok/s and the time that is left."""

    def __init__(self) -> None:
        columns = (
            *(TextColumn("answers"), BarColumn(), TextColumn("{task.completed}/{task.total}")),
            *(TextColumn("{task.fields[line]}"), TimeRemainingColumn()),
        )
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("answers", total=None, line="")
        self._shown = time.monotonic()

    def __enter__(self) -> SynthProgress:
        if console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, report: SynthReport) -> None:
        failed = sum(report.failed.values())
        line = f"{report.tokens_per_s:,.0f} tok/s, {failed:,} failed"
        self._bar.update(self._task, total=report.planned, completed=report.settled, line=line)
        now = time.monotonic()
        if not console.is_terminal and now - self._shown >= LINE_S:
            self._shown = now
            asked = max(report.saved + failed, 1)
            left = (report.planned - report.settled) * report.seconds / asked
            say(f"answers {report.settled:,}/{report.planned:,}, {line}, about {left:,.0f} s left")
