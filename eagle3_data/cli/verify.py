"""`eagle3-data verify`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.progress import Progress

from eagle3_data.cli.progress import answer, console
from eagle3_data.status import format_bytes


def verify_command(
    where: Annotated[str, typer.Argument(help="Folder of a build, or the URL of a mirror (hf://datasets/ORG/NAME).")],
    head: Annotated[
        str | None, typer.Option(help="The target: its head is checked against the server's own top-1 tokens.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="A patched server: some samples are captured again.")] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", help="With --against: how many.")] = 32,
    api_key: Annotated[
        str | None, typer.Option(help="The server's API key.", envvar="EAGLE3_DATA_API_KEY", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(help="Threads.")] = 2,
) -> None:
    """Check every byte of a build against its manifest, without a GPU. Exit code 1 when something is wrong.

    Example: eagle3-data verify qwen3-data --head Qwen/Qwen3-8B --against http://127.0.0.1:30000 -n 32
    """
    from eagle3_data.verify import Problem, verify
    from eagle3_data.verify_source import open_source

    source = open_source(where)
    total = source.manifest().nbytes
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("verify", total=total)
        report = verify(where, on_shard=lambda row: bar.advance(task, row.nbytes), workers=workers)
    lines = []
    if head is not None and report.ok:
        from eagle3_data.verify_head import check_head

        data = source.samples()
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("head", total=len(data))
            found = check_head(data, head, on_sample=lambda n: bar.advance(task, n))
        lines.append(str(found))
        if not found.ok:
            report.problems.append(Problem(str(found)))
    if against is not None and report.ok:
        from eagle3_data.builders.reextract import reextract

        data = source.samples()
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("capture again", total=min(samples, len(data)))
            compared = reextract(data, against, samples, api_key=api_key, on_sample=lambda: bar.advance(task))
        lines.append(str(compared))
        report.problems += [Problem(text) for text in compared.problems]
    for line in lines:
        answer.print(line, soft_wrap=True, highlight=False, markup=False)
    for problem in report.problems:
        answer.print(f"BAD  {problem}", soft_wrap=True, highlight=False, markup=False)
    answer.print(
        f"{'OK' if report.ok else 'BAD'}: {report.samples:,} samples, {report.tokens:,} tokens, "
        f"{report.shards:,} shards, {format_bytes(report.nbytes)}, {len(report.problems)} problems",
        soft_wrap=True,
        highlight=False,
    )
    sys.exit(0 if report.ok else 1)
