"""The servers of a run: which are alive, how much each has been asked for, and which gets the next sample."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from eagle3_data.builders.knee import Knee
from eagle3_data.builders.matching import Matcher
from eagle3_data.builders.spool import Spool
from eagle3_data.errors import BuildFailed, ConfigError, Eagle3Error, ServerUnfit
from eagle3_data.protocol import CaptureInfo
from eagle3_data.server.client import ServerClient

PROBE_S = 2.0
CameBack = Callable[[Sequence[CaptureInfo]], Awaitable[None]]
"""Called with what a server says of itself, one info per data-parallel rank, before it gets work again."""
SPOOL_MARGIN = 1 << 20
"""Left free in the spool beyond the next sample, bytes: headers, error records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowConfig:
    """How much a run asks for at once."""

    max_inflight: int | Literal["auto"] = 64
    """Requests in flight per server; "auto": as many as raise its throughput."""
    window: int = 256
    """Samples of neighbouring shards that are sent longest first; more keeps more shards open at once."""
    inflight_bytes: int | None = None
    """State bytes asked for and not yet in a shard, per server. None: half the server's high-water mark."""
    request_timeout_s: float = 600.0
    """From sending a prompt to its response."""
    dump_timeout_s: float = 60.0
    """From the response to the dump."""
    server_timeout_s: float = 900.0
    """How long a run waits when no server is alive."""
    retries: int = 3
    """Further attempts for a sample whose failure may pass."""
    grace_s: float = 30.0
    """After Ctrl-C: how long requests in flight may still finish."""

    def __post_init__(self) -> None:
        if self.max_inflight != "auto" and self.max_inflight <= 0:
            raise ConfigError(f"flow.max_inflight must be > 0 or 'auto', got {self.max_inflight!r}")
        for name in ("window", "request_timeout_s", "dump_timeout_s", "server_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"flow.{name} must be > 0, got {getattr(self, name)}")
        if self.retries < 0 or self.grace_s < 0:
            raise ConfigError("flow.retries and flow.grace_s must be >= 0")


class Server:
    """One server of the pool and what is outstanding on it."""

    def __init__(self, client: ServerClient, info: CaptureInfo, spool: Spool, matcher: Matcher, budget: int) -> None:
        self.client, self.info, self.spool, self.matcher, self.budget = client, info, spool, matcher, budget
        self.alive, self.requests, self.tokens, self.bytes = True, 0, 0, 0
        self.knee = Knee()
        self.crowded = ""
        """Why the last sample asked for found no space in the spool; empty when it did."""
        self.refused = ""
        """Why a server that is back gets no work: it captures something else now."""

    def has_room(self, nbytes: int, flow: FlowConfig) -> bool:
        """One sample has room on an idle server, however large it is, as long as its spool has the space."""
        limit = self.knee.limit if flow.max_inflight == "auto" else flow.max_inflight
        self.crowded = ""
        if self.requests and not (self.requests < limit and self.bytes + nbytes <= self.budget):
            return False
        free = self.spool.free_bytes()
        short = free is not None and free < nbytes + SPOOL_MARGIN
        self.crowded = f"the spool of {self.client.url} has {free:,} bytes free" if short else ""
        return not short


class ServerPool:
    """Least outstanding tokens first. A server that dies is probed and used again when it is back and still fits."""

    def __init__(
        self,
        servers: Sequence[Server],
        flow: FlowConfig,
        bytes_per_token: int,
        fits: Callable[[CaptureInfo, str], None],
        came_back: CameBack,
    ) -> None:
        self.servers, self.flow, self.bytes_per_token, self._fits = list(servers), flow, bytes_per_token, fits
        self._came_back = came_back
        self._changed = asyncio.Condition()
        self._probes: set[asyncio.Task[None]] = set()
        self._dead_since: float | None = None
        self._broken: BaseException | None = None
        """What ended a probe that should never end so; raised by the next `pick`."""

    @property
    def up(self) -> int:
        return sum(server.alive for server in self.servers)

    @property
    def note(self) -> str:
        """What every request waits for; empty while one server takes work."""
        crowded = [server.crowded for server in self.servers if server.alive]
        if not crowded:
            return f"waiting: no server alive{self._refusals()}"
        return f"waiting: {crowded[0]}" if all(crowded) else ""

    async def pick(self, tokens: int) -> Server:
        """Wait for a server with room for a prompt of `tokens`. Raises BuildFailed when none is alive for too long."""
        async with self._changed:
            while True:
                if self._broken is not None:
                    raise self._broken
                nbytes = tokens * self.bytes_per_token
                able = [
                    server
                    for server in self.servers
                    if server.alive and server.has_room(nbytes, self.flow) and server.matcher.may_send(tokens)
                ]
                if able:
                    chosen = min(able, key=lambda server: server.tokens)
                    chosen.requests += 1
                    chosen.tokens += tokens
                    chosen.bytes += nbytes
                    return chosen
                self._check_alive()
                try:
                    await asyncio.wait_for(self._changed.wait(), PROBE_S)
                except asyncio.TimeoutError:
                    continue

    @asynccontextmanager
    async def lease(self, server: Server, tokens: int) -> AsyncIterator[Server]:
        """Gives the room back that `pick` took."""
        try:
            yield server
        finally:
            server.requests -= 1
            server.tokens -= tokens
            server.bytes -= tokens * self.bytes_per_token
            server.knee.done(tokens, time.monotonic())
            async with self._changed:
                self._changed.notify_all()

    def mark_down(self, server: Server) -> None:
        """Called on a connection error: no more work until a probe says otherwise."""
        if not server.alive:
            return
        server.alive = False
        task = asyncio.create_task(self._revive(server))
        self._probes.add(task)
        task.add_done_callback(self._probed)

    def _probed(self, task: asyncio.Task[None]) -> None:
        self._probes.discard(task)
        if not task.cancelled():
            self._broken = self._broken or task.exception()

    async def _revive(self, server: Server) -> None:
        """A restarted server must show the same capture before it gets work."""
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                infos = await server.client.capture_infos()
                for info in infos:
                    self._fits(info, server.client.url)
                if infos[0].spool != server.info.spool:
                    raise ServerUnfit(f"{server.client.url}: its spool is {infos[0].spool}, was {server.info.spool}")
            except Eagle3Error as error:
                server.refused = error.message if isinstance(error, ServerUnfit) else ""
                continue
            server.refused = ""
            await self._came_back(infos)
            server.info, server.alive, self._dead_since = infos[0], True, None
            async with self._changed:
                self._changed.notify_all()
            return

    def _check_alive(self) -> None:
        if self.up:
            self._dead_since = None
            return
        now = time.monotonic()
        self._dead_since = self._dead_since or now
        if now - self._dead_since > self.flow.server_timeout_s:
            raise BuildFailed(
                f"no server alive for {self.flow.server_timeout_s:.0f} s: "
                + ", ".join(server.client.url for server in self.servers)
                + self._refusals(),
                next="start it again and repeat the same command: the build goes on where it stopped",
            )

    def _refusals(self) -> str:
        found = [server.refused for server in self.servers if server.refused]
        return f" ({'; '.join(found)})" if found else ""

    async def close(self) -> None:
        for task in list(self._probes):
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
