"""The state of a build in parts, from their journals alone: what one builder of the whole would say."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from eagle3_data.builders.plan import Plan
from eagle3_data.builders.sink import free_bytes
from eagle3_data.journal import Event, Tick, journal_path, read_tail
from eagle3_data.runlock import is_held

PART_TAIL_BYTES = 1 << 15


class FleetProgress:
    """Totals are the whole plan's, known before the first part begins."""

    def __init__(
        self, out: Path, parts: Sequence[Path], plan: Plan, skipped: dict[str, int], servers: Sequence[str]
    ) -> None:
        self.out, self.parts, self.skipped, self.servers = out, list(parts), skipped, len(servers)
        self.samples, self._tokens, self._nbytes = len(plan.rows), plan.total_tokens, plan.expected_nbytes
        self._ended: set[int] = set()
        history = read_tail(journal_path(out))
        self._before_s = history[-1].active_s if history else 0.0
        self._started = time.monotonic()

    @property
    def failed(self) -> dict[str, int]:
        return self.tick().failed

    def end(self, index: int) -> None:
        """Part `index` has no worker any more, and waits for none."""
        self._ended.add(index)

    def tick(self, event: Event = "tick", phase: str = "extract", note: str = "") -> Tick:
        found = [self._last(folder) for folder in self.parts]
        ticks = [tick for tick in found if tick is not None]
        live = [tick for i, tick in enumerate(found) if tick is not None and i not in self._ended]
        medians = sorted(tick.request_s for tick in live if tick.request_s)
        return Tick(
            event=event,
            t=time.time(),
            phase=phase,
            done=sum(tick.done for tick in ticks),
            of=self.samples,
            tokens=sum(tick.tokens for tick in ticks),
            tokens_of=self._tokens,
            nbytes=sum(tick.nbytes for tick in ticks),
            nbytes_of=self._nbytes,
            failed=_sum(tick.failed for tick in ticks),
            failed_tokens=sum(tick.failed_tokens for tick in ticks),
            retried=_sum(tick.retried for tick in ticks),
            skipped=self.skipped,
            run_tokens=sum(tick.run_tokens for tick in ticks),
            active_s=self._before_s + time.monotonic() - self._started,
            inflight=sum(tick.inflight for tick in live if tick.event != "end"),
            request_s=medians[len(medians) // 2] if medians else 0.0,
            slowest_s=max((tick.slowest_s for tick in ticks), default=0.0),
            free_bytes=free_bytes(self.out),
            servers_up=min(self.servers, sum(tick.servers_up for tick in live if tick.event != "end")),
            servers=self.servers,
            note=note or self._note(found),
        )

    def _note(self, found: list[Tick | None]) -> str:
        """What parts wait for; the first that does, and how many more."""
        told = []
        for i, (folder, tick) in enumerate(zip(self.parts, found, strict=True)):
            if i in self._ended:
                continue
            if not is_held(folder):
                told.append(f"part {i} waits for a worker")
            elif tick is not None and tick.note and tick.event == "tick":
                told.append(f"part {i} {tick.note}")
        more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
        return told[0] + more if told else ""

    def _last(self, folder: Path) -> Tick | None:
        ticks = read_tail(journal_path(folder), PART_TAIL_BYTES)
        return ticks[-1] if ticks else None


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
