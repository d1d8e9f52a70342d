"""The extraction loop: samples out, dumps in, many at once, every failure with a reason, nothing lost on the way.

One task per sample: pick a server, send the ids, take the dump, prove it, place it, drop it. The loop itself only
decides what is sent next and what an error means.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import numpy as np

from eagle3_data.builders.dumps import Dump, Request, open_dump
from eagle3_data.builders.order import Job, Order, PlanOrder
from eagle3_data.builders.plan import PlannedShard
from eagle3_data.builders.pool import FlowConfig, Server, ServerPool
from eagle3_data.builders.samples.store import Sample
from eagle3_data.builders.sink import ShardSink, free_bytes
from eagle3_data.errors import BuildFailed, ConnectionLost, DumpMismatch, Eagle3Error, RequestTimeout, SpoolFull
from eagle3_data.failures import Failure
from eagle3_data.hub.scratch import Scratch
from eagle3_data.journal import Event, Tick
from eagle3_data.protocol import RequestId

ATTEMPTS_PER_RUN = 100
"""Attempt numbers of process n start at n * 100, so a restarted builder never reuses an id that may be in flight."""
BACKOFF_S = 0.5
ROOM_POLL_S = 0.2
DEATHS = 5
"""A sample that was in flight at this many server deaths is given up: it may be what kills them."""


class Extractor:
    """Runs a plan to its end. `incarnation`: how often this build was started before."""

    def __init__(
        self,
        sink: ShardSink,
        pool: ServerPool,
        flow: FlowConfig,
        *,
        run: str,
        incarnation: int,
        max_failures: int,
        baseline: Tick | None,
        on_tick: Callable[[Tick], None],
        interval_s: float = 5.0,
        order: Order | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        self.sink, self.pool, self.flow, self.scratch = sink, pool, flow, scratch
        self.order: Order = order or PlanOrder(flow.window)
        self._room_note = ""
        self.run_id, self.incarnation, self.max_failures = run, incarnation, max_failures
        self.on_tick, self.interval_s = on_tick, interval_s
        self.retried: Counter[str] = Counter()
        self.sent = 0
        self._before_s = baseline.active_s if baseline else 0.0
        self._before_tokens = baseline.run_tokens if baseline else 0
        self._run_tokens = 0
        self._started = time.monotonic()
        self._retry: deque[Job] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._seconds: deque[float] = deque(maxlen=100)
        self._slowest = 0.0
        self._inflight: set[str] = set()
        self._leftovers: dict[str, Path] = {}
        self.adopted = 0
        self.swept = 0
        """Dumps thrown away because nobody waits for them any more."""
        self._stopped = False
        self._halt = asyncio.Event()
        """Set when nothing more is sent: by `stop`, or by the run's fatal error."""
        self._fatal: BaseException | None = None

    def stop(self) -> None:
        """Send nothing more; requests in flight may finish (Ctrl-C, SIGTERM)."""
        self._stopped = True
        self._halt.set()

    @property
    def stopped(self) -> bool:
        return self._stopped

    async def run(self, finish: Callable[[], Coroutine[None, None, None]]) -> None:
        """Returns when every sample is settled and `finish` is done, or when `stop` was called.

        Raises BuildFailed and unexpected errors.
        """
        for server in self.pool.servers:
            for rid, path in server.spool.leftovers(self.run_id).items():
                self._leftovers[rid] = path
        ticker = asyncio.create_task(self._tick_forever())
        ticker.add_done_callback(self._ended)
        try:
            async for job in self.order.jobs(self):
                await self._send_retries()
                if self.leaving:
                    break
                await self._send(job)
            await self._drain()
            if not self.leaving:
                self._leftovers.clear()
                await self._sweep()
                self._spawn(finish())  # a task among tasks: it may wait for the disk, and Ctrl-C ends that
                await self._drain()
        finally:
            ticker.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(ticker, *self._tasks, return_exceptions=True)
        if self._fatal is not None:
            raise self._fatal

    def tick(self, event: Event = "tick", phase: str = "extract", note: str = "") -> Tick:
        """The state of the run now."""
        sink, plan = self.sink, self.sink.manifest.plan
        up = self.pool.up
        return Tick(
            event=event,
            t=time.time(),
            phase=phase,
            done=sink.ledger.saved,
            of=plan.samples,
            tokens=sink.tokens,
            tokens_of=plan.tokens,
            nbytes=sink.nbytes,
            nbytes_of=plan.nbytes,
            failed=sink.ledger.failed,
            failed_tokens=sink.ledger.failed_tokens,
            retried=dict(self.retried),
            skipped=plan.skipped,
            run_tokens=self._before_tokens + self._run_tokens,
            active_s=self._before_s + time.monotonic() - self._started,
            inflight=len(self._tasks),
            request_s=float(np.median(self._seconds)) if self._seconds else 0.0,
            slowest_s=self._slowest,
            free_bytes=free_bytes(sink.folder),
            servers_up=up,
            servers=len(self.pool.servers),
            note=note or sink.note or self._room_note or self.pool.note,
        )

    @property
    def leaving(self) -> bool:
        """Nothing more is sent."""
        return self._halt.is_set()

    def _fail(self, error: BaseException) -> None:
        """The first error that nobody handles ends the run; what is in flight may finish."""
        self._fatal = self._fatal or error
        self._halt.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Whatever ends a task is retrieved here: a run never goes on, or ends well, without it."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _drain(self) -> None:
        """Let what is in flight end; bounded when the user wants to leave."""
        while (self._tasks or self._retry) and not self.leaving:
            await self._send_retries()
            if self._tasks:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED, timeout=1.0)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.flow.grace_s)

    def begins(self, planned: PlannedShard) -> bool:
        """Takes the local space of a shard, if there is any: sealed ones go to the mirror and are removed."""
        return (
            self.scratch is None
            or self.sink.is_sealed(planned.name)
            or self.scratch.begin(planned.name, planned.nbytes)
        )

    async def room(self, planned: PlannedShard) -> bool:
        """Wait until the shard begins. False when the run ends before."""
        while not self.leaving and not self.begins(planned):
            self._room_note = self.scratch.note if self.scratch else ""
            await self._send_retries()
            await asyncio.sleep(ROOM_POLL_S)
        self._room_note = ""
        return not self.leaving

    async def _send_retries(self) -> None:
        while self._retry and not self.leaving:
            await self._send(self._retry.popleft())

    async def _send(self, job: Job) -> None:
        sample = self.sink.store.row(job.row)
        if await self._adopt(job, sample):
            return
        pick = asyncio.ensure_future(self.pool.pick(sample.tokens))
        halt = asyncio.ensure_future(self._halt.wait())
        await asyncio.wait({pick, halt}, return_when=asyncio.FIRST_COMPLETED)
        halt.cancel()
        if not pick.done():
            pick.cancel()
            await asyncio.gather(pick, return_exceptions=True)
            return
        self._spawn(self._attempt(job, sample, pick.result()))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def _requeue(self, job: Job, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self._retry.append(job)

    async def _adopt(self, job: Job, sample: Sample) -> bool:
        """Use the dump that an earlier process of this build asked for and did not take; proven like any other."""
        if not self._leftovers:
            return False
        instances = {row.instance for row in self.sink.manifest.servers}
        for rid in [rid for rid in self._leftovers if rid.split("-")[2] == sample.key]:
            path, parsed = self._leftovers[rid], RequestId.parse(rid)
            assert parsed is not None
            request = Request(parsed, sample.input_ids.tolist())
            try:
                with await asyncio.to_thread(open_dump, path, request, self.sink.spec) as dump:
                    if dump.instance not in instances:
                        continue
                    await self.sink.place(job.shard, sample, request, dump)
            except (Eagle3Error, FileNotFoundError):
                continue  # not whole, or not this sample's: it is captured again
            finally:
                del self._leftovers[rid]
                path.unlink(missing_ok=True)
            self.adopted += 1
            await self.sink.seal_if_settled(job.shard)
            return True
        return False

    async def _attempt(self, job: Job, sample: Sample, server: Server) -> None:
        started = time.monotonic()
        try:
            async with self.pool.lease(server, sample.tokens):
                await self._capture(job, sample, server)
        except Eagle3Error as error:
            self._judge(job, sample, server, error)
        else:
            seconds = time.monotonic() - started
            self._seconds.append(seconds)
            self._slowest = max(self._slowest, seconds)
            self._run_tokens += sample.tokens
        await self.sink.seal_if_settled(job.shard)

    async def _capture(self, job: Job, sample: Sample, server: Server) -> None:
        """Raises the family of errors that `_judge` knows."""
        number = self.incarnation * ATTEMPTS_PER_RUN + job.attempt
        request = Request(RequestId(self.run_id, sample.key, number), sample.input_ids.tolist())
        came = False
        self._inflight.add(str(request.rid))
        server.matcher.sent(request)
        self.sent += 1
        try:
            try:
                reply = await asyncio.wait_for(
                    server.client.prefill(request.input_ids, str(request.rid)), self.flow.request_timeout_s
                )
            except asyncio.TimeoutError:
                raise RequestTimeout(
                    f"{server.client.url}: no response in {self.flow.request_timeout_s:.0f} s"
                ) from None
            if reply.prompt_tokens != request.tokens:
                raise DumpMismatch(f"server took {reply.prompt_tokens} of {request.tokens} tokens of {request.rid}")
            with await self._take(server, request) as dump:
                came = True
                if dump.instance and dump.instance not in self.sink.instances:
                    raise ConnectionLost(f"{server.client.url} was started again: a dump of {dump.instance}")
                await self.sink.place(job.shard, sample, request, dump)
        finally:
            self._inflight.discard(str(request.rid))
            await asyncio.shield(server.matcher.drop(request, came=came))

    async def _take(self, server: Server, request: Request) -> Dump:
        """The dump, proven. One that comes over the network waits for local space; it stays at its server meanwhile."""
        while True:
            try:
                dump = await server.matcher.take(request, self.flow.dump_timeout_s)
            except OSError as error:
                await self.sink.pause(request.rid.key, error)
                continue
            self.sink.go_on(request.rid.key)
            return dump

    def _judge(self, job: Job, sample: Sample, server: Server, error: Eagle3Error) -> None:
        """Repeat what may pass, give up what will not, stop the run when too much was given up."""
        deaths, limit = job.deaths, job.attempt < self.flow.retries
        if isinstance(error, ConnectionLost):
            self.pool.mark_down(server)
            deaths += 1
            limit = deaths < DEATHS
        elif isinstance(error, SpoolFull):
            limit = True
        if error.retryable and limit and job.attempt < ATTEMPTS_PER_RUN - 1:
            self.retried[error.reason] += 1
            again = replace(job, attempt=job.attempt + 1, deaths=deaths)
            self._spawn(self._requeue(again, BACKOFF_S * 2 ** min(job.attempt, 5)))
            return
        self.sink.give_up(
            job.shard,
            Failure.of(sample, error, job.attempt + 1),
        )
        given_up = len(self.sink.ledger.failures)
        if given_up > self.max_failures:
            self._fail(
                BuildFailed(
                    f"{given_up} samples failed, more than the {self.max_failures} allowed; the last: {error.message}",
                    next="see failures.jsonl, mend the cause, then repeat the command (or eagle3-data retry DIR)",
                )
            )

    async def _sweep(self) -> None:
        for server in self.pool.servers:
            self.swept += await asyncio.to_thread(server.spool.sweep, self.run_id, self._awaits)

    def _awaits(self, rid: str) -> bool:
        return rid in self._inflight or rid in self._leftovers

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self.interval_s)
            await self._sweep()
            self.on_tick(self.tick())
