"""One build on many machines: dealt in parts, each part a build of its own, watched through their folders, merged.

Engine-neutral: a `Crew` runs parts somewhere (`ray_crew`), and the folder `out`, which every machine sees, is all that
driver and workers share. Part i lies in `.build/parts/i`, so a second call goes on with the same parts, wherever they
were before; `status` on `out` works as on any build.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from eagle3_data import durable
from eagle3_data.builders.connect import check_fits, probe, spec_of
from eagle3_data.builders.fleet_part import Outcome, PartJob
from eagle3_data.builders.fleet_progress import FleetProgress
from eagle3_data.builders.merge import merge_locked
from eagle3_data.builders.plan import Plan, check_plan, written_bytes
from eagle3_data.builders.resume import HEAD, make_fingerprint
from eagle3_data.builders.samples.store import STORE, SampleStore, drops_path, record_path
from eagle3_data.builders.settings import BuildConfig, BuildReport
from eagle3_data.builders.stored import load_store, make_folder, parts_path, remember
from eagle3_data.errors import BuildFailed, ConfigError
from eagle3_data.journal import Journal, Tick
from eagle3_data.manifest import MANIFEST, Manifest
from eagle3_data.runlock import RunLock, work_folder

PARTS = "parts"
STOP_MARGIN_S = 30.0
"""Beyond the grace of requests in flight, for sealing, before a worker that was asked to stop is given up."""


class Crew(Protocol):
    """Workers somewhere; each runs `work_part` in a main thread, and again when its machine is lost."""

    def start(self, job: PartJob) -> None: ...

    def ended(self, timeout_s: float) -> Mapping[int, Outcome]:
        """Parts that ended since the last call; waits for one, `timeout_s` at most."""

    def stop(self) -> None:
        """Ask all workers to end in order."""

    def abandon(self) -> None:
        """End at once those that are left."""


def build_fleet(
    config: BuildConfig,
    crew: Callable[[], contextlib.AbstractContextManager[Crew]],
    *,
    on_tick: Callable[[Tick], None],
    on_text: Callable[[str], None],
) -> BuildReport:
    """Run all parts to their end and merge them, or go on until Ctrl-C.

    Raises the family of `eagle3_data.errors`; BuildFailed names the parts that did not finish. What they placed stays.
    """
    make_folder(config.out)
    with durable.full_disk_is_said(config.out), RunLock(config.out):
        store = load_store(config, on_text)
        plan = _whole_plan(config, store)
        count = part_count(config, len(plan))
        folders = [work_folder(config.out) / PARTS / str(i) for i in range(count)]
        if (config.out / MANIFEST).exists() and not all((folder / MANIFEST).exists() for folder in folders):
            raise ConfigError(
                f"{config.out} is complete and its parts are gone",
                next="use it as it is, or another --out to start anew",
            )
        written = sum(written_bytes(one, Manifest.load(one)) for one in folders if (one / MANIFEST).exists())
        check_plan(
            plan,
            config.out,
            written=written,
            context_length=int(store.tokens.max()),  # of each server: asked by its own part
            key_of=lambda row: store.row(row).key,
        )
        _check_same(config, store, plan, folders)
        remember(config)
        progress = FleetProgress(config.out, folders, plan, dict(store.report.dropped), config.servers)
        jobs = [_prepare(config, folder, i, count) for i, folder in enumerate(folders)]
        on_text(
            f"{len(store):,} samples, {plan.total_tokens:,} tokens -> {len(plan)} shards in {count} parts: "
            + "; ".join(f"{job.index} with {', '.join(job.servers)}" for job in jobs)
        )
        with crew() as workers:
            return _run(config, jobs, workers, progress, on_tick, on_text)


def part_count(config: BuildConfig, shards: int) -> int:
    """How many parts `out` is dealt in: said once, remembered, since their folders hold what is done.

    Raises ConfigError when the folder was begun otherwise.
    """
    path = parts_path(config.out)
    if path.exists():
        count = int(json.loads(path.read_text())["parts"])
        if config.workers not in (None, count):
            raise ConfigError(
                f"this build was begun with {count} workers, now there are to be {config.workers}",
                next=f"--workers {count}, or none; servers may be more or fewer than before",
            )
        return count
    if (config.out / MANIFEST).exists():
        raise ConfigError(f"{config.out} was begun with --engine local", next="go on with that, or another --out")
    count = min(config.workers or len(config.servers), shards)
    durable.write_text(path, json.dumps({"parts": count}) + "\n")
    return count


def deal(servers: Sequence[str], index: int, count: int) -> tuple[str, ...]:
    """The servers of part `index`: every `count`-th; one that is shared when there are fewer than parts."""
    return tuple(servers[index::count]) or (servers[index % len(servers)],)


def _whole_plan(config: BuildConfig, store: SampleStore) -> Plan:
    """Of the whole build, before it is dealt. All servers are asked: a wrong one is known before anything starts."""

    async def ask() -> Plan:
        found = await probe(config.servers, config.api_key)
        try:
            spec = spec_of(found[0].infos[0], config.model, config.last, config.encoding, config.last_encoding)
            for one in found:
                for info in one.infos:
                    check_fits(info, spec, one.client.url)
        finally:
            for one in found:
                await one.client.close()
        return Plan(store.tokens, spec, config.shard_bytes, split=config.split)

    return asyncio.run(ask())


def _check_same(config: BuildConfig, store: SampleStore, plan: Plan, folders: Sequence[Path]) -> None:
    """Before a part's settings are replaced. Raises ManifestMismatch; the head's weights are for each part to check."""
    for index, folder in enumerate(folders):
        if (folder / MANIFEST).exists():
            manifest = Manifest.load(folder)
            part = _of_part(config, folder, index, len(folders))
            manifest.check_same(make_fingerprint(part, store, plan.spec, manifest.fingerprint.get(HEAD, "")))


def _of_part(config: BuildConfig, folder: Path, index: int, count: int) -> BuildConfig:
    return replace(config, out=folder.resolve(), part=(index, count), engine="local", workers=None, retry_failed=False)


def _prepare(config: BuildConfig, folder: Path, index: int, count: int) -> PartJob:
    """The part's folder with its settings and the samples, which were rendered once."""
    remember(_of_part(config, folder, index, count))
    source, target = work_folder(config.out), work_folder(folder)
    samples = Path(STORE)
    for name in (samples, drops_path(samples), record_path(samples), Path("inputs.json")):
        old, new = source / name, target / name
        if not old.exists() or (new.exists() and new.samefile(old)):
            continue
        hidden = durable.hidden(new)
        hidden.unlink(missing_ok=True)
        try:
            os.link(old, hidden)
        except OSError:
            shutil.copyfile(old, hidden)
        durable.replace(new)
    return PartJob(
        index=index,
        folder=str(folder.resolve()),
        servers=deal(config.servers, index, count),
        api_key=config.api_key,
        retry_failed=config.retry_failed,
        cwd=os.getcwd(),
    )


def _run(
    config: BuildConfig,
    jobs: Sequence[PartJob],
    crew: Crew,
    progress: FleetProgress,
    on_tick: Callable[[Tick], None],
    on_text: Callable[[str], None],
) -> BuildReport:
    journal, outcomes = Journal(config.out), dict[int, Outcome]()

    def write(tick: Tick) -> None:
        journal.write(tick)
        on_tick(tick)

    phase, note = "failed", ""
    try:
        write(progress.tick("start"))
        limit = sum(progress.failed.values()) + max(1, int(config.max_failure_share * progress.samples))
        with _signals() as asked:
            for job in jobs:
                crew.start(job)
            too_many = _watch(config, jobs, crew, progress, outcomes, write, asked, limit)
        if too_many:
            raise BuildFailed(
                f"{sum(progress.failed.values())} samples failed in all parts, more than the {limit} allowed",
                next="see failures.jsonl in the parts, mend the cause, then repeat the command (or eagle3-data retry)",
            )
        reports = [outcome.report for outcome in outcomes.values() if outcome.report is not None]
        if not asked.is_set() and (bad := {i: one for i, one in sorted(outcomes.items()) if one.report is None}):
            raise _failed(bad, jobs)
        complete = len(reports) == len(jobs) and all(report.complete for report in reports)
        if complete:
            on_text(f"merging {len(jobs)} parts")
            merge_locked([Path(job.folder) for job in jobs], config.out)
        phase = "finished" if complete else "interrupted"
        return _report(config, reports, progress, complete)
    except BaseException as error:
        note = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise
    finally:
        write(progress.tick("end", phase, note))
        journal.close()


def _watch(
    config: BuildConfig,
    jobs: Sequence[PartJob],
    crew: Crew,
    progress: FleetProgress,
    outcomes: dict[int, Outcome],
    write: Callable[[Tick], None],
    asked: threading.Event,
    limit: int,
) -> bool:
    """Until every part ended. Too many failures, or a signal, ask all to end. True for too many failures."""
    ticked, stopping, too_many = time.monotonic(), None, False
    while len(outcomes) < len(jobs):
        for index, outcome in crew.ended(min(0.5, config.interval_s)).items():
            outcomes[index] = outcome
            progress.end(index)
        now = time.monotonic()
        if now - ticked >= config.interval_s:
            ticked = now
            write(progress.tick())
            too_many = too_many or sum(progress.failed.values()) > limit
        if stopping is None and (asked.is_set() or too_many):
            stopping = now
            crew.stop()
        elif stopping is not None and now > stopping + config.flow.grace_s + STOP_MARGIN_S:
            crew.abandon()  # nothing is lost: a part goes on from what was placed, however it ended
            break
    return too_many


def _failed(bad: dict[int, Outcome], jobs: Sequence[PartJob]) -> BuildFailed:
    told = "; ".join(f"part {i} ({', '.join(jobs[i].servers)}): {one.error}" for i, one in bad.items())
    first = next(iter(bad.values())).next
    return BuildFailed(
        f"{len(bad)} of {len(jobs)} parts did not finish: {told}",
        next=f"{first + '; ' if first else ''}repeat the same command (--server may name others): it goes on from here",
    )


def _report(
    config: BuildConfig, reports: Sequence[BuildReport], progress: FleetProgress, complete: bool
) -> BuildReport:
    last = progress.tick()
    retried: Counter[str] = Counter()
    for report in reports:
        retried.update(report.retried)
    totals: dict[str, Any] = {
        name: sum(getattr(report, name) for report in reports) for name in ("sent", "resumed", "adopted", "swept")
    }
    return BuildReport(
        out=config.out,
        complete=complete,
        planned=progress.samples + sum(last.skipped.values()),
        saved=last.done,
        failed=last.failed,
        skipped=last.skipped,
        retried=dict(retried),
        tokens=last.tokens,
        nbytes=last.nbytes,
        tokens_per_s=last.run_tokens / last.active_s if last.active_s else 0.0,
        **totals,
    )


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """Set at the first Ctrl-C or SIGTERM; the next one ends the driver at once. Signals reach the main thread alone."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def first(number: int, frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, first) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
