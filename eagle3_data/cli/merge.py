"""`eagle3-data merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from eagle3_data.builders.merge import merge
from eagle3_data.cli.progress import answer, console
from eagle3_data.manifest import Manifest
from eagle3_data.status import format_bytes


def merge_command(
    parts: Annotated[list[Path], typer.Argument(help="Folders of all parts, each from `build --shards i/n`.")],
    out: Annotated[Path, typer.Option(help="Folder of the whole build. Files are linked where that is possible.")],
) -> None:
    """Join the parts of a build. No byte of a shard changes; repeating it is safe.

    Example: eagle3-data merge kimi-part-* --out kimi-data
    """
    total = sum(len(Manifest.load(folder).shards) for folder in parts)
    with Progress(console=console) as progress:
        task = progress.add_task("merge", total=total)
        merged = merge(parts, out, on_shard=lambda row: progress.advance(task))
    answer.print(
        f"{out}: {merged.saved:,} samples, {len(merged.shards):,} shards, {format_bytes(merged.nbytes)}, "
        f"{sum(merged.failed.values()):,} failed",
        highlight=False,
    )
