"""Renderers in processes of their own. Started fresh (spawn): a tokenizer's threads do not survive a fork."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor

from eagle3_data.builders.samples.input import RawRow
from eagle3_data.builders.samples.prepare import RendererPlan
from eagle3_data.builders.samples.rows import Chunk, RowRenderer

_renderer: RowRenderer | None = None
"""This process's renderer, built once by `_start`."""


class WorkerPool:
    """`workers` processes that turn lists of raw rows into chunks."""

    def __init__(self, plan: RendererPlan, workers: int) -> None:
        self._pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start, initargs=(plan,)
        )

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, rows: list[RawRow]) -> Future[Chunk]:
        return self._pool.submit(_work, rows)


def _start(plan: RendererPlan) -> None:
    global _renderer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
    _renderer = plan.build()


def _work(rows: list[RawRow]) -> Chunk:
    assert _renderer is not None
    return _renderer.chunk(rows)
