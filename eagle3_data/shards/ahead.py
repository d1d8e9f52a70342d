"""Samples of a mirror, fetched before they are asked for: what hides the network from a loop over a stream.

It learns from the loop: the columns of the last sample are the ones that are fetched for the next, in one go; samples
that were fetched and not asked for (a shuffle buffer takes them in another order) turn reading ahead off.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from eagle3_data.shards.table import SampleTable

THREADS = 4
BUDGET_BYTES = 1 << 30
"""Of samples that are on their way or waiting; one sample is always allowed."""
WASTE = 8
"""This many samples fetched for nothing, and no more is read ahead."""
Tensors = dict[str, torch.Tensor]


class ReadAhead:
    """Over one table, in one process. `take` may be called by several threads."""

    def __init__(self, table: SampleTable, *, budget_bytes: int = BUDGET_BYTES, threads: int = THREADS) -> None:
        self.table, self.budget_bytes = table, budget_bytes
        self._threads = ThreadPoolExecutor(threads, "eagle3-ahead")
        self._lock = threading.Lock()
        self._coming: OrderedDict[int, Future[Tensors]] = OrderedDict()
        self._row, self._names = -1, set[str]()
        self._habit: tuple[str, ...] = ()
        self._rest: Tensors = {}
        self.wasted = 0

    def expect(self, rows: Iterable[int]) -> None:
        """Rows that will be asked for soon, the next one first."""
        with self._lock:
            habit = tuple(self._names) if len(self._names) > len(self._habit) else self._habit
            if not habit or self.wasted >= WASTE:
                return
            held = sum(int(self.table.nbytes[row]) for row in self._coming)
            for row in rows:
                if row in self._coming:
                    continue
                held += int(self.table.nbytes[row])
                if self._coming and held > self.budget_bytes:
                    return
                self._coming[row] = self._threads.submit(self.table.read, row, habit)

    def take(self, row: int, name: str) -> torch.Tensor:
        """One column of one sample; the other columns that the loop uses come with it."""
        with self._lock:
            if row != self._row:
                self._habit = tuple(self._names)
                self._row, self._names, self._rest = row, set(), {}
            self._names.add(name)
            if name in self._rest:
                return self._rest.pop(name)
            future = self._coming.pop(row, None)
            if future is None and self._coming and next(iter(self._coming)) != row:
                stale, _ = self._coming.popitem(last=False)  # the loop goes another way
                self.wasted += stale != row
            habit = self._habit if name in self._habit else (name,)
        tensors = future.result() if future is not None else {}
        if name not in tensors:
            tensors = self.table.read(row, habit)
        found = tensors.pop(name)
        with self._lock:
            if self._row == row:
                self._rest.update(tensors)
        return found

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
