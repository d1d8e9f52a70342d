"""`eagle3-data verify`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from eagle3_data.cli.progress import answer, console
from eagle3_data.manifest import Manifest
from eagle3_data.status import format_bytes


def verify_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a build.")],
    workers: Annotated[int, typer.Option(help="Threads.")] = 2,
) -> None:
    """Check every byte of a build against its manifest, without a GPU. Exit code 1 when something is wrong.

    Example: eagle3-data verify qwen3-data
    """
    from eagle3_data.verify import verify

    total = Manifest.load(folder).nbytes
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("verify", total=total)
        report = verify(folder, on_shard=lambda row: bar.advance(task, row.nbytes), workers=workers)
    for problem in report.problems:
        answer.print(f"BAD  {problem}", soft_wrap=True, highlight=False, markup=False)
    answer.print(
        f"{'OK' if report.ok else 'BAD'}: {report.samples:,} samples, {report.tokens:,} tokens, "
        f"{report.shards:,} shards, {format_bytes(report.nbytes)}, {len(report.problems)} problems",
        soft_wrap=True,
        highlight=False,
    )
    sys.exit(0 if report.ok else 1)
