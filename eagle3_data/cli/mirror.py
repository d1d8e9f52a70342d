"""`eagle3-data push` and `pull`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub.utils.tqdm import disable_progress_bars
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from eagle3_data.cli.cache import ShardCache, ShardCacheSize
from eagle3_data.cli.progress import answer, console, say
from eagle3_data.errors import ConfigError
from eagle3_data.hub.beside import where_of
from eagle3_data.hub.mirror import make_mirror
from eagle3_data.hub.pull import Pull
from eagle3_data.hub.push import Push, PushConfig, PushReport
from eagle3_data.manifest import Manifest, ShardRow
from eagle3_data.patience import Patience
from eagle3_data.runlock import is_held
from eagle3_data.shards.cache import choose_cache
from eagle3_data.status import format_bytes


def push_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a build, finished or running.")],
    repo: Annotated[str, typer.Argument(help="ORG/NAME on the hub (HF_ENDPOINT counts), or a URL: s3://bucket/name.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on while the build runs, until it ends.")] = False,
    delete_local: Annotated[
        bool, typer.Option("--delete-local", help="Remove shards once the mirror confirmed size and sha256.")
    ] = False,
    license: Annotated[str | None, typer.Option(help="Licence id for the card, e.g. apache-2.0.")] = None,
    workers: Annotated[int, typer.Option(help="Shards on their way at once.")] = 4,
    commit_shards: Annotated[int, typer.Option(help="Shards per commit.")] = 50,
) -> None:
    """Send sealed shards to a mirror, with card, index and manifest. The same command goes on where it stopped.

    Example: eagle3-data push kimi-data my-org/kimi-k25-states --license other
    """
    disable_progress_bars()
    config = PushConfig(workers=workers, commit_shards=commit_shards, delete_local=delete_local, license=license)
    total = Manifest.load(folder).nbytes
    with _bar() as bar:
        task = bar.add_task("push", total=total)

        def sent(row: ShardRow) -> None:
            bar.update(task, total=Manifest.load(folder).nbytes, advance=row.nbytes)

        mirror = make_mirror(repo, Patience(on_wait=say))
        push = Push(folder, mirror, config, where=where_of(repo), on_text=say, on_sent=sent)
        before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
        signal.signal(signal.SIGTERM, lambda *_: push.stop.set())
        signal.signal(signal.SIGINT, lambda *_: _stop(push))
        try:
            mirror.open(create=True)
            report = push.run(more=(lambda: is_held(folder)) if follow else lambda: False)
        finally:
            mirror.close()
            for number, handler in before:
                signal.signal(number, handler)
    print_push(report)
    if push.stop.is_set():
        say("interrupted: what is published stays; the same command goes on from here")
        sys.exit(130)
    sys.exit(0 if report.complete else 1)


def _stop(push: Push) -> None:
    """The first Ctrl-C lets shards on their way arrive and publishes them, the next one ends at once."""
    if push.stop.is_set():
        raise KeyboardInterrupt
    say("stopping after what is on its way; Ctrl-C again ends at once")
    push.stop.set()


def print_push(report: PushReport) -> None:
    for problem in report.problems:
        answer.print(f"BAD  {problem}", soft_wrap=True, highlight=False, markup=False)
    removed = f", {report.deleted:,} removed here" if report.deleted else ""
    answer.print(
        f"{report.target}: {report.published:,} of {report.of:,} shards published, {report.sent:,} sent now "
        f"({format_bytes(report.sent_bytes)}), {report.there:,} were there, {report.commits:,} commits{removed}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def pull_command(
    repo: Annotated[str, typer.Argument(help="ORG/NAME on the hub, or the URL of a mirror.")],
    folder: Annotated[Path, typer.Argument(help="Where to; the same command goes on where it stopped.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a repository.")] = None,
    workers: Annotated[int, typer.Option(help="Shards at once.")] = 4,
    shard_cache: ShardCache = None,
    shard_cache_size: ShardCacheSize = None,
) -> None:
    """Fetch a mirror into a folder, every shard checked against the manifest. Shards in the cache are copied from it.

    Example: eagle3-data pull my-org/kimi-k25-states kimi-data
    """
    disable_progress_bars()
    if workers < 1:
        raise ConfigError("--workers must be at least 1")
    mirror = make_mirror(repo, Patience(on_wait=say), revision=revision)
    with _bar() as bar:
        task = bar.add_task("pull", total=None)
        pull = Pull(
            mirror,
            folder,
            workers=workers,
            cache=choose_cache(shard_cache, shard_cache_size),
            on_start=lambda manifest: bar.update(task, total=manifest.nbytes),
            on_bytes=lambda count: bar.advance(task, count),
        )
        try:
            mirror.open(create=False)
            report = pull.run()
        finally:
            mirror.close()
    cached = f", {report.cached:,} from the cache" if report.cached else ""
    answer.print(
        f"{folder}: {report.shards:,} shards, {report.there:,} were here{cached}, {report.fetched:,} fetched "
        f"({format_bytes(report.fetched_bytes)}), all checksums are right",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
