"""`eagle3-data verify`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from eagle3_data.cli.progress import answer, console, say
from eagle3_data.manifest import Manifest
from eagle3_data.status import format_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found, and the end of the line that says what was looked at."""

    problems: list[str]
    looked_at: str
    mirrored: int = 0


def verify_command(
    where: Annotated[str, typer.Argument(help="Folder of a build, or a mirror: hf://datasets/ORG/NAME, s3://...")],
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

    A mirror is checked by its checksums, without downloading tensors where it tells them (--head and --against read
    the samples that they need).

    Example: eagle3-data verify qwen3-data --head Qwen/Qwen3-8B --against http://127.0.0.1:30000 -n 32
    """
    verdict = verify_mirror(where) if "://" in where else verify_folder(Path(where), workers)
    problems = list(verdict.problems)
    if head is not None and not problems:
        problems += verify_head(where, head)
    if against is not None and not problems:
        problems += verify_against(where, against, samples, api_key)
    for problem in problems:
        answer.print(f"BAD  {problem}", soft_wrap=True, highlight=False, markup=False)
    answer.print(
        f"{'BAD' if problems else 'OK'}: {verdict.looked_at}, {len(problems)} problems",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    if verdict.mirrored:
        say(f"{verdict.mirrored:,} shards are not here: the mirror has them (eagle3-data verify MIRROR checks those)")
    sys.exit(1 if problems else 0)


def verify_folder(folder: Path, workers: int) -> Verdict:
    from eagle3_data.verify import verify

    total = Manifest.load(folder).nbytes
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("verify", total=total)
        report = verify(folder, on_shard=lambda row: bar.advance(task, row.nbytes), workers=workers)
    looked_at = (
        f"{report.samples:,} samples, {report.tokens:,} tokens, {report.shards:,} shards, {format_bytes(report.nbytes)}"
    )
    return Verdict([str(problem) for problem in report.problems], looked_at, report.mirrored)


def verify_mirror(target: str) -> Verdict:
    from eagle3_data.hub.check import check_mirror
    from eagle3_data.hub.mirror import make_mirror
    from eagle3_data.hub.patience import Patience

    mirror = make_mirror(target, Patience(on_wait=say))
    mirror.open(create=False)
    report = check_mirror(mirror)
    how = f"{format_bytes(report.read_bytes)} read" if report.read_bytes else "by the mirror's own sha256"
    looked_at = (
        f"{report.url}, {report.shards:,} shards, {report.samples:,} samples, {format_bytes(report.nbytes)}, {how}"
        f"{'' if report.complete else ', still growing'}"
    )
    return Verdict(report.problems, looked_at)


def verify_head(where: str, model: str) -> list[str]:
    """Prints the share of top-1 tokens that agree; the problem, if it is one."""
    from eagle3_data.shards.remote import open_samples
    from eagle3_data.verify_head import check_head

    data = open_samples(where)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("head", total=len(data))
        found = check_head(data, model, on_sample=lambda n: bar.advance(task, n))
    answer.print(str(found), soft_wrap=True, highlight=False, markup=False)
    return [] if found.ok else [str(found)]


def verify_against(where: str, server: str, samples: int, api_key: str | None) -> list[str]:
    """Prints how far newly captured states lie from the stored ones; the problems."""
    from eagle3_data.builders.reextract import reextract
    from eagle3_data.shards.remote import open_samples

    data = open_samples(where)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("capture again", total=min(samples, len(data)))
        compared = reextract(data, server, samples, api_key=api_key, on_sample=lambda: bar.advance(task))
    answer.print(str(compared), soft_wrap=True, highlight=False, markup=False)
    return compared.problems
