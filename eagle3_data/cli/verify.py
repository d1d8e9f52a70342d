"""`eagle3-data verify`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from eagle3_data.cli.cache import ShardCache, ShardCacheSize
from eagle3_data.cli.progress import answer, console, say
from eagle3_data.hub.notes import deleted_shards, mirrored_shards
from eagle3_data.manifest import Manifest
from eagle3_data.status import format_bytes

if TYPE_CHECKING:
    from eagle3_data.hub.mirror import Mirror
    from eagle3_data.shards.table import SampleTable


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found, and the end of the line that says what was looked at."""

    problems: list[str]
    looked_at: str
    hints: tuple[str, ...] = ()


def verify_command(
    where: Annotated[str, typer.Argument(help="Folder of a build, or a mirror: hf://datasets/ORG/NAME, s3://...")],
    head: Annotated[
        str | None, typer.Option(help="The target: its head is checked against the server's own top-1 tokens.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="A patched server: some samples are captured again.")] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="With --against: how many.")] = 32,
    api_key: Annotated[
        str | None, typer.Option(help="The server's API key.", envvar="EAGLE3_DATA_API_KEY", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(help="Threads.")] = 2,
    shard_cache: ShardCache = None,
    shard_cache_size: ShardCacheSize = None,
) -> None:
    """Check every byte of a build against its manifest, without a GPU. Exit code 1 when something is wrong.

    A mirror is checked by its checksums, without downloading tensors where it tells them (--head and --against read
    the samples that they need). Shards that `push --delete-local` removed here are checked there.

    Example: eagle3-data verify qwen3-data --head Qwen/Qwen3-8B --against http://127.0.0.1:30000 -n 32
    """
    verdict = verify_mirror(where) if "://" in where else verify_folder(Path(where), workers)
    problems = list(verdict.problems)
    if not problems and (head is not None or against is not None):
        from eagle3_data.shards.remote import open_samples

        data = open_samples(where, shard_cache=shard_cache, shard_cache_size=shard_cache_size)
        if head is not None:
            problems += verify_head(data, head)
        if against is not None and not problems:
            problems += verify_against(data, against, samples, api_key)
    for problem in problems:
        answer.print(f"BAD  {problem}", soft_wrap=True, highlight=False, markup=False)
    answer.print(
        f"{'BAD' if problems else 'OK'}: {verdict.looked_at}, {len(problems)} problems",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    for line in verdict.hints:
        say(line)
    sys.exit(1 if problems else 0)


def verify_folder(folder: Path, workers: int) -> Verdict:
    from eagle3_data.verify import verify

    total = Manifest.load(folder).nbytes
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("verify", total=total)
        report = verify(folder, on_shard=lambda row: bar.advance(task, row.nbytes), workers=workers)
    problems = [str(problem) for problem in report.problems]
    if report.mirrored:
        problems += verify_removed(folder)
    far = f" ({report.mirrored:,} of them in a mirror)" if report.mirrored else ""
    looked_at = (
        f"{report.samples:,} samples, {report.tokens:,} tokens, {report.shards:,} shards{far}, "
        f"{format_bytes(report.nbytes)}"
    )
    urls = sorted(set(mirrored_shards(folder).values())) if problems else ()
    hints = tuple(f"next: eagle3-data pull {url} {folder} fetches shards that are missing here" for url in urls)
    return Verdict(problems, looked_at, hints)


def verify_removed(folder: Path) -> list[str]:
    """Are the shards that `push --delete-local` removed in their mirrors, as they were here? By checksums."""
    from eagle3_data.hub.check import check_removed

    problems = []
    for url in sorted(set(deleted_shards(folder).values())):
        say(f"shards that are not here are checked in {url}")
        with opened(url) as mirror:
            problems += check_removed(mirror, folder)
    return problems


@contextlib.contextmanager
def opened(target: str) -> Iterator[Mirror]:
    from eagle3_data.hub.mirror import make_mirror
    from eagle3_data.patience import Patience

    mirror = make_mirror(target, Patience(on_wait=say))
    mirror.open(create=False)
    try:
        yield mirror
    finally:
        mirror.close()


def verify_mirror(target: str) -> Verdict:
    from eagle3_data.hub.check import check_mirror

    with opened(target) as mirror, Progress(console=console, transient=True) as bar:
        task = bar.add_task("verify", total=None)
        report = check_mirror(mirror, on_shard=lambda row: bar.advance(task))
    how = f"{format_bytes(report.read_bytes)} read" if report.read_bytes else "by the mirror's own sha256"
    looked_at = (
        f"{report.url}, {report.shards:,} shards, {report.samples:,} samples, {format_bytes(report.nbytes)}, {how}"
        f"{'' if report.complete else ', still growing'}"
    )
    return Verdict(report.problems, looked_at)


def verify_head(data: SampleTable, model: str) -> list[str]:
    """Prints the share of top-1 tokens that agree; the problem, if it is one."""
    from eagle3_data.verify_head import check_head

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("head", total=len(data))
        found = check_head(data, model, on_sample=lambda n: bar.advance(task, n))
    answer.print(str(found), soft_wrap=True, highlight=False, markup=False)
    return [] if found.ok else [str(found)]


def verify_against(data: SampleTable, server: str, samples: int, api_key: str | None) -> list[str]:
    """Prints how far newly captured states lie from the stored ones; the problems."""
    from eagle3_data.builders.reextract import reextract

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("capture again", total=min(samples, len(data)))
        compared = reextract(data, server, samples, api_key=api_key, on_sample=lambda: bar.advance(task))
    answer.print(str(compared), soft_wrap=True, highlight=False, markup=False)
    return compared.problems
