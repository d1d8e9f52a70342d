"""`eagle3-data build`: from conversations and running servers to a finished, verified, publishable folder.

Every stage can be repeated: the same command goes on where the last one stopped, or says which setting differs.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_data import durable
from eagle3_data.builders.connect import Probed, foreign_info, make_pool, probe, server_row, spec_of
from eagle3_data.builders.extract import Extractor
from eagle3_data.builders.ledger import Ledger
from eagle3_data.builders.matching import STRENGTHS, Strength
from eagle3_data.builders.plan import Plan, check_plan
from eagle3_data.builders.pool import FlowConfig
from eagle3_data.builders.samples.spec import SampleSpec
from eagle3_data.builders.samples.store import SampleStore
from eagle3_data.builders.sink import ShardSink
from eagle3_data.builders.stored import load_store
from eagle3_data.capture import LAST_STATES, CaptureSpec, LastState
from eagle3_data.card import write_card
from eagle3_data.errors import ConfigError, ServerUnfit
from eagle3_data.journal import Journal, Tick, journal_path, read_tail
from eagle3_data.manifest import MANIFEST, Manifest, PlanRow
from eagle3_data.runlock import RunLock, work_folder
from eagle3_data.server.client import ServerClient
from eagle3_data.shards.index import consolidate

OnTick = Callable[[Tick], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildConfig:
    """One build. The folder `out` remembers it: a resume with other data-shaping settings is refused."""

    out: Path
    inputs: tuple[str, ...]
    """Conversation files (see docs/samples.md)."""
    model: str
    """Tokenizer and target: a folder or hub id, as the server names it."""
    servers: tuple[str, ...]
    dataset: str = "custom"
    split: str = "train"
    samples: SampleSpec = field(default_factory=SampleSpec)
    layers: tuple[int, ...] | None = None
    """Expected aux layers (outputs); None: whatever the servers capture."""
    last: LastState = "hidden"
    shard_bytes: int = 1 << 30
    flow: FlowConfig = field(default_factory=FlowConfig)
    max_failure_share: float = 0.01
    """The run stops once more samples than this share of all were given up (one is always allowed)."""
    matching: Strength = "identity"
    spool: Path | None = None
    """Only for matching by token count: where the older patch writes."""
    api_key: str | None = None
    trust_remote_code: bool = False
    retry_failed: bool = False
    """Try the given-up samples of earlier runs again, in shards of their own."""
    interval_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.max_failure_share <= 1:
            raise ConfigError(f"--max-failure-share must be between 0 and 1, got {self.max_failure_share}")
        for name, value, known in (("--last", self.last, LAST_STATES), ("--matching", self.matching, STRENGTHS)):
            if value not in known:
                raise ConfigError(f"{name} {value!r} is not one of {', '.join(known)}")
        if self.matching == "token_count" and self.spool is None:
            raise ConfigError("matching by token count needs --spool", next="or use a server with the eagle3-data plugin")


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildReport:
    """How a run ended. saved + failed + skipped == planned when `complete`."""

    out: Path
    complete: bool
    planned: int
    saved: int
    failed: dict[str, int]
    skipped: dict[str, int]
    retried: dict[str, int]
    sent: int
    """Requests sent by this run."""
    resumed: int
    """Samples that were there when this run began."""
    adopted: int
    """Dumps of an earlier process that were used."""
    swept: int
    """Dumps nobody waited for any more, thrown away."""
    tokens: int
    nbytes: int
    tokens_per_s: float
    """Of the whole build, all runs together."""


def build(config: BuildConfig, *, on_tick: OnTick, on_text: Callable[[str], None]) -> BuildReport:
    """Run the build to its end, or to Ctrl-C. `on_text` gets one line per finished stage.

    Raises the family of `eagle3_data.errors`; whatever was placed before stays and is used by the next run.
    """
    make_folder(config.out)
    with RunLock(config.out):
        store = load_store(config, on_text)
        return asyncio.run(_build(config, store, on_tick, on_text))


def make_folder(out: Path) -> None:
    """Raises ConfigError when `out` cannot be made or written."""
    try:
        work_folder(out).mkdir(parents=True, exist_ok=True)
        probe_file = work_folder(out) / ".write-test"
        probe_file.write_text("")
        probe_file.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}", next="another --out, or other permissions") from error


async def _build(
    config: BuildConfig, store: SampleStore, on_tick: OnTick, on_text: Callable[[str], None]
) -> BuildReport:
    found = await _servers(config)
    spec = spec_of(found[0].infos[0], config.model, config.last)
    if config.layers is not None and spec.layers != config.layers:
        raise ServerUnfit(
            f"the server captures outputs of layers {list(spec.layers)}, --layers asks for {list(config.layers)}",
            next=f"eagle3-data serve --layers {','.join(map(str, config.layers))}",
        )
    base = Plan(store.tokens, spec, config.shard_bytes, split=config.split)
    manifest = _open_manifest(config, store, spec, base, found)
    ledger = Ledger(config.out, manifest.plan.planned, manifest.plan.skipped)
    plans = _retry_plans(config, store, manifest, base, ledger)
    check_plan(
        base,
        config.out,
        written=manifest.nbytes,
        context_length=min(info.context_length for one in found for info in one.infos),
        key_of=lambda row: store.row(row).key,
    )
    on_text(
        f"{len(base.rows):,} samples, {base.total_tokens:,} tokens -> {len(base)} shards; "
        f"outputs of layers {list(spec.layers)}, width {spec.width}, {spec.dtype}, last {spec.last}"
    )
    pool = make_pool(found, spec, config.flow, config.matching, work_folder(config.out) / "fetch")
    sink = ShardSink(config.out, plans, store, manifest, ledger)
    before = ledger.saved
    if before:
        on_text(f"resuming: {before:,} samples in sealed shards are kept")
    journal, history = Journal(config.out), read_tail(journal_path(config.out))
    extractor = Extractor(
        sink,
        pool,
        config.flow,
        run=manifest.run,
        incarnation=_next_incarnation(config.out),
        max_failures=len(ledger.failures) + max(1, int(config.max_failure_share * len(base.rows))),
        baseline=history[-1] if history else None,
        on_tick=lambda tick: (journal.write(tick), on_tick(tick)),  # type: ignore[func-returns-value]
        interval_s=config.interval_s,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, extractor.stop)
    phase, note = "failed", ""
    try:
        journal.write(extractor.tick("start"))
        await extractor.run()
        complete = not extractor.stopped
        ledger.check(complete=complete)
        if complete:
            _finish(config, sink)
        phase = "finished" if complete else "interrupted"
        return _report(config, extractor, complete)
    except BaseException as error:
        note = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        last = extractor.tick("end", phase, note)
        sink.close()
        ledger.close()
        journal.write(last)
        journal.close()
        on_tick(last)
        await pool.close()


async def _servers(config: BuildConfig) -> list[Probed]:
    if config.matching == "identity":
        return await probe(config.servers, config.api_key)
    if len(config.servers) != 1 or config.spool is None:
        raise ConfigError("matching by token count works with one server and its --spool")
    client = ServerClient(config.servers[0], api_key=config.api_key)
    await client.check_health()
    return [Probed(client, (foreign_info(config.model, config.spool, config.layers),))]


def _open_manifest(
    config: BuildConfig, store: SampleStore, spec: CaptureSpec, plan: Plan, found: Sequence[Probed]
) -> Manifest:
    """The folder's manifest, checked against these settings, or a new one. Servers of this run are added."""
    fingerprint = make_fingerprint(config, store, spec)
    rows = tuple(server_row(info) for one in found for info in one.infos)
    if (config.out / MANIFEST).exists():
        manifest = Manifest.load(config.out)
        manifest.check_same(fingerprint)
    else:
        manifest = Manifest(
            dataset=config.dataset,
            split=config.split,
            run=secrets.token_hex(4),
            capture=spec.to_dict(),
            samples=store.spec.to_dict(),
            fingerprint=fingerprint,
            matching=config.matching,
            plan=PlanRow(
                samples=len(plan.rows),
                tokens=plan.total_tokens,
                nbytes=plan.nbytes,
                shards=len(plan),
                shard_bytes=config.shard_bytes,
                skipped=dict(store.report.dropped),
            ),
        )
    known = {row.instance for row in manifest.servers}
    servers = (*manifest.servers, *(row for row in rows if row.instance not in known))
    manifest = manifest.model_copy(update={"servers": servers, "state": "building"})
    manifest.save(config.out)
    return manifest


def make_fingerprint(config: BuildConfig, store: SampleStore, spec: CaptureSpec) -> dict[str, str]:
    """Everything that shapes the shards, by the name an error should use."""
    fields: dict[str, Any] = {
        "dataset": config.dataset,
        "split": config.split,
        "samples (ids and masks)": store.digest,
        "shard_bytes": config.shard_bytes,
        "matching": config.matching,
        **{f"capture.{name}": value for name, value in spec.to_dict().items()},
        **{f"samples.{name}": value for name, value in store.spec.to_dict().items()},
    }
    return {name: value if isinstance(value, str) else json.dumps(value, sort_keys=True) for name, value in fields.items()}


def _retry_plans(
    config: BuildConfig, store: SampleStore, manifest: Manifest, base: Plan, ledger: Ledger
) -> list[Plan]:
    """Shards for samples that were given up and are tried again; a sealed shard is never touched.

    A failed sample whose own shard is still open is simply tried again there.
    """
    path = work_folder(config.out) / "retries.json"
    rounds: list[list[int]] = json.loads(path.read_text()) if path.exists() else []
    plans = [base]

    def add(rows: list[int]) -> None:
        number = sum(len(plan) for plan in plans)
        chosen = np.array(rows, np.int64)
        plans.append(
            Plan(store.tokens, base.spec, config.shard_bytes, split=config.split, rows=chosen, first_number=number)
        )

    for rows in rounds:
        add(rows)
    if config.retry_failed and ledger.failures:
        sealed = {row.name for row in manifest.shards}
        still_open = {row for plan in plans for shard in plan if shard.name not in sealed for row in shard.rows.tolist()}
        failed = set(ledger.forgive())
        rows = [row for row in range(len(store)) if row not in still_open and store.row(row).key in failed]
        if rows:
            add(rows)
            durable.write_text(path, json.dumps([*rounds, rows]))
    return plans


def _next_incarnation(out: Path) -> int:
    path = work_folder(out) / "incarnation"
    number = int(path.read_text()) + 1 if path.exists() else 0
    durable.write_text(path, str(number))
    return number


def _finish(config: BuildConfig, sink: ShardSink) -> None:
    """Index in one file, card, and last the manifest's word that the build is complete."""
    manifest = sink.manifest.model_copy(update={"state": "complete", "failed": sink.ledger.failed})
    sink.ledger.rewrite()
    sink.tidy()
    consolidate(config.out, manifest)
    write_card(config.out, manifest)
    manifest.save(config.out)
    sink.manifest = manifest


def _report(config: BuildConfig, extractor: Extractor, complete: bool) -> BuildReport:
    sink, tick = extractor.sink, extractor.tick()
    return BuildReport(
        out=config.out,
        complete=complete,
        planned=sink.ledger.planned,
        saved=sink.ledger.saved,
        failed=sink.ledger.failed,
        skipped=sink.ledger.skipped,
        retried=dict(extractor.retried),
        sent=extractor.sent,
        resumed=sink.resumed,
        adopted=extractor.adopted,
        swept=extractor.swept,
        tokens=sink.tokens,
        nbytes=sink.nbytes,
        tokens_per_s=tick.run_tokens / tick.active_s if tick.active_s else 0.0,
    )
