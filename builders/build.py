"""`eagle3-data build`: from conversations and running servers to a finished, verified, publishable folder.

Every stage can be repeated: the same command goes on where the last one stopped, or says which setting differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

from eagle3_data import durable
from eagle3_data.builders.connect import Probed, foreign_info, make_pool, probe, server_row, spec_of
from eagle3_data.builders.extract import Extractor
from eagle3_data.builders.ledger import Ledger
from eagle3_data.builders.mirroring import build_beside
from eagle3_data.builders.order import Order
from eagle3_data.builders.plan import Plan, check_plan, written_bytes
from eagle3_data.builders.resume import all_plans, next_incarnation, open_manifest
from eagle3_data.builders.samples.store import SampleStore
from eagle3_data.builders.settings import BuildConfig, BuildReport
from eagle3_data.builders.sink import ShardSink
from eagle3_data.builders.stored import load_store, make_folder, parts_path, remember
from eagle3_data.capture import CaptureSpec
from eagle3_data.card import write_card
from eagle3_data.errors import ConfigError, ServerUnfit
from eagle3_data.head import TargetHead
from eagle3_data.hub.beside import PushBeside
from eagle3_data.journal import Journal, Tick, journal_path, read_tail
from eagle3_data.protocol import CaptureInfo
from eagle3_data.runlock import RunLock, work_folder
from eagle3_data.server.client import ServerClient
from eagle3_data.shards.index import consolidate

OnTick = Callable[[Tick], None]


def build(
    config: BuildConfig, *, on_tick: OnTick, on_text: Callable[[str], None], order: Order | None = None
) -> BuildReport:
    """Run the build to its end, or to Ctrl-C. `on_text` gets one line per finished stage; `order`: the plan's if None.

    Raises the family of `eagle3_data.errors`; whatever was placed before stays and is used by the next run.
    """
    make_folder(config.out)
    if parts_path(config.out).exists():
        raise ConfigError(f"{config.out} was begun with --engine ray", next="go on with that, or another --out")
    with durable.full_disk_is_said(config.out), RunLock(config.out):
        store = load_store(config, on_text)
        if config.mirror is None:
            return asyncio.run(_build(config, store, None, on_tick, on_text, order))
        return build_beside(
            config, lambda beside: asyncio.run(_build(config, store, beside, on_tick, on_text, order)), on_text
        )


async def _build(
    config: BuildConfig,
    store: SampleStore,
    beside: PushBeside | None,
    on_tick: OnTick,
    on_text: Callable[[str], None],
    order: Order | None,
) -> BuildReport:
    found = await _servers(config)
    try:
        return await _run(config, store, found, beside, on_tick, on_text, order)
    finally:
        for one in found:
            await one.client.close()


async def _run(
    config: BuildConfig,
    store: SampleStore,
    found: list[Probed],
    beside: PushBeside | None,
    on_tick: OnTick,
    on_text: Callable[[str], None],
    order: Order | None,
) -> BuildReport:
    scratch = beside.scratch if beside else None
    spec = spec_of(found[0].infos[0], config.model, config.last, config.encoding, config.last_encoding)
    if config.layers is not None and spec.layers != config.layers:
        raise ServerUnfit(
            f"the server captures outputs of layers {list(spec.layers)}, --layers asks for {list(config.layers)}",
            next=f"eagle3-data serve --layers {','.join(map(str, config.layers))}",
        )
    base = Plan(store.tokens, spec, config.shard_bytes, split=config.split)
    if config.part is not None:
        base = base.part(*config.part)
    head = await asyncio.to_thread(_head, config, spec)
    manifest = open_manifest(config, store, spec, base, found, head.digest() if head else "")
    if order is None:  # not what training changes for itself
        remember(config)
    ledger = Ledger(config.out, manifest.plan.planned, manifest.plan.skipped)
    plans = all_plans(config, store, manifest, base, ledger)
    check_plan(
        base,
        config.out,
        written=written_bytes(config.out, manifest),
        context_length=min(info.context_length for one in found for info in one.infos),
        key_of=lambda row: store.row(row).key,
        scratch_bytes=scratch.limit_bytes if scratch else None,
    )
    on_text(
        f"{len(base.rows):,} samples, {base.total_tokens:,} tokens -> {len(base)} shards; "
        f"outputs of layers {list(spec.layers)}, width {spec.width}, {spec.dtype}, last {spec.last}"
    )
    on_empty = scratch.gone if scratch else lambda name: None
    sink = ShardSink(config.out, plans, store, manifest, ledger, head, on_empty=on_empty)
    sink.reopen()

    async def came_back(infos: Sequence[CaptureInfo]) -> None:
        await sink.add_servers([server_row(info) for info in infos])

    scratch_folder = work_folder(config.out) / "fetch"
    pool = make_pool(found, spec, config.flow, config.matching, scratch_folder, came_back)
    if ledger.saved:
        on_text(f"resuming: {ledger.saved:,} samples are kept")
    journal, history = Journal(config.out), read_tail(journal_path(config.out))

    def write_tick(tick: Tick) -> None:
        journal.write(tick)
        on_tick(tick)

    extractor = Extractor(
        sink,
        pool,
        config.flow,
        run=manifest.run,
        incarnation=next_incarnation(config.out),
        max_failures=len(ledger.failures) + max(1, int(config.max_failure_share * len(base.rows))),
        baseline=history[-1] if history else None,
        on_tick=write_tick,
        interval_s=config.interval_s,
        order=order,
        scratch=scratch,
    )
    phase, note, complete = "failed", "", False

    async def finish() -> None:
        nonlocal complete
        ledger.check(complete=True)
        await sink.patiently("the end", lambda: _finish(config, sink))
        complete = True

    try:
        journal.write(extractor.tick("start"))
        with stop_on_signals(extractor.stop):
            await extractor.run(finish)
        ledger.check(complete=complete)
        phase = "finished" if complete else "interrupted"
        return _report(config, extractor, complete)
    except BaseException as error:
        note = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise
    finally:
        last = extractor.tick("end", phase, note)
        sink.close()
        ledger.close()
        journal.write(last)
        journal.close()
        on_tick(last)
        await pool.close()


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run in order, the next one at once. Signals reach the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

    def first() -> None:
        stop()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _head(config: BuildConfig, spec: CaptureSpec) -> TargetHead | None:
    """The target's head when the top-k is made from it; only that tensor of the checkpoint is read."""
    if not spec.top_k:
        return None
    head = TargetHead.load(config.head or config.model, width=spec.width, device=config.head_device)
    if spec.top_k > head.vocab_size:
        raise ConfigError(f"--last {spec.last}: the target has only {head.vocab_size} tokens")
    return head


async def _servers(config: BuildConfig) -> list[Probed]:
    if config.matching == "identity":
        return await probe(config.servers, config.api_key)
    if len(config.servers) != 1 or config.spool is None:
        raise ConfigError("matching by token count works with one server and its --spool")
    client = ServerClient(config.servers[0], api_key=config.api_key)
    await client.check_health()
    return [Probed(client, (foreign_info(config.model, config.spool, config.layers),))]


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
