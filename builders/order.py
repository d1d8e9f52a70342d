"""What is captured next: the plan's own order, longest first inside a window.

Live training brings an order of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from eagle3_data.errors import DiskFull

if TYPE_CHECKING:
    from eagle3_data.builders.extract import Extractor
    from eagle3_data.builders.plan import PlannedShard


@dataclass(frozen=True, slots=True)
class Job:
    """One sample to capture: row of the store, the shard it belongs to, what happened to it so far."""

    row: int
    shard: str
    attempt: int = 0
    deaths: int = 0


class Order(Protocol):
    """What is captured next. `jobs` opens the shards it needs and gives each of their pending samples once."""

    def jobs(self, extractor: Extractor) -> AsyncIterator[Job]: ...


class PlanOrder:
    """Shard by shard; the samples of neighbouring shards that make a window longest first.

    A long prompt that comes last is waited for alone; the shards of a window are open together.
    """

    def __init__(self, window: int) -> None:
        self.window = window

    async def jobs(self, extractor: Extractor) -> AsyncIterator[Job]:
        sink = extractor.sink
        waiting: list[Job] = []
        for planned in chain.from_iterable(sink.plans):
            if extractor.leaving:
                return
            if not extractor.begins(planned):  # room comes from shards that are sealed, so send what they lack first
                for job in self._longest_first(extractor, waiting):
                    yield job
                waiting = []
                if not await extractor.room(planned):
                    return
            rows = await self._open(extractor, planned)
            if not rows:
                await sink.seal_if_settled(planned.name)
            waiting.extend(Job(row, planned.name) for row in rows)
            if len(waiting) >= self.window:
                for job in self._longest_first(extractor, waiting):
                    yield job
                waiting = []
        for job in self._longest_first(extractor, waiting):
            yield job

    async def _open(self, extractor: Extractor, planned: PlannedShard) -> list[int]:
        """Rows that the shard lacks; waits while the disk is full, as long as the run does not end."""
        sink = extractor.sink
        while not extractor.leaving:
            try:
                rows = sink.open_shard(planned)
            except (DiskFull, OSError) as error:
                await sink.pause(planned.name, error)
                continue
            sink.go_on(planned.name)
            return rows
        return []

    def _longest_first(self, extractor: Extractor, jobs: list[Job]) -> list[Job]:
        return sorted(jobs, key=lambda job: -int(extractor.sink.store.tokens[job.row]))
