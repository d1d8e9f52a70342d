"""`eagle3-data verify`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from eagle3_data.cli.progress import answer, console, say
from eagle3_data.manifest import Manifest
from eagle3_data.status import format_bytes


def verify_command(
    folder: Annotated[str, typer.Argument(help="Folder of a build, or a mirror: hf://datasets/ORG/NAME, s3://...")],
    workers: Annotated[int, typer.Option(help="Threads.")] = 2,
) -> None:
    """Check every byte of a build against its manifest, without a GPU. Exit code 1 when something is wrong.

    A mirror is checked by its checksums, without downloading tensors where it tells them.

    Example: eagle3-data verify qwen3-data
    """
    if "://" in folder:
        sys.exit(verify_mirror(folder))
    from eagle3_data.verify import verify

    total = Manifest.load(Path(folder)).nbytes
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("verify", total=total)
        report = verify(Path(folder), on_shard=lambda row: bar.advance(task, row.nbytes), workers=workers)
    for problem in report.problems:
        answer.print(f"BAD  {problem}", soft_wrap=True, highlight=False, markup=False)
    answer.print(
        f"{'OK' if report.ok else 'BAD'}: {report.samples:,} samples, {report.tokens:,} tokens, "
        f"{report.shards:,} shards, {format_bytes(report.nbytes)}, {len(report.problems)} problems",
        soft_wrap=True,
        highlight=False,
    )
    if report.mirrored:
        say(f"{report.mirrored:,} shards are not here: the mirror has them (eagle3-data verify MIRROR checks those)")
    sys.exit(0 if report.ok else 1)


def verify_mirror(target: str) -> int:
    """Exit code: 0 when the mirror is what its manifest says."""
    from eagle3_data.hub.check import check_mirror
    from eagle3_data.hub.mirror import make_mirror
    from eagle3_data.hub.patience import Patience

    mirror = make_mirror(target, Patience(on_wait=say))
    mirror.open(create=False)
    report = check_mirror(mirror)
    for problem in report.problems:
        answer.print(f"BAD  {problem}", soft_wrap=True, highlight=False, markup=False)
    how = f"{format_bytes(report.read_bytes)} read" if report.read_bytes else "by the mirror's own sha256"
    answer.print(
        f"{'OK' if report.ok else 'BAD'}: {report.url}, {report.shards:,} shards, {report.samples:,} samples, "
        f"{format_bytes(report.nbytes)}, {how}{'' if report.complete else ', still growing'}, "
        f"{len(report.problems)} problems",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    return 0 if report.ok else 1
