"""The scheduler's side of the process that writes dumps (`writing`): what there is to write goes out, reports come in.

The scheduler thread puts one list per batch into a queue and never waits. One thread waits for the batch's copies and
sends the list on, another takes reports and gives host memory back. Should the process that writes die, its prompts get
error records and another one is started.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from eagle3_data.patches.sglang.arena import Arena, SharedBlock
from eagle3_data.patches.sglang.copier import CopiedRows
from eagle3_data.patches.sglang.dumps import DumpForm, write_error
from eagle3_data.patches.sglang.messages import Abandon, Begin, Change, Close, Fail, Report, Rows, Setup
from eagle3_data.patches.sglang.rows import Prompt
from eagle3_data.protocol import DUMP_SUFFIX, DumpError, SpoolConfig

logger = logging.getLogger(__name__)

SWEEP_S = 5.0
"""How often prompts that will never be complete are looked for."""
RESTART_S = 1.0
"""Between two starts of the process that writes."""


@dataclass(slots=True)
class Counters:
    """What became of our prompts since the server started."""

    written: int = 0
    failed: int = 0
    backlog_bytes: int = 0
    """States captured and not yet in the spool under their final name."""


@dataclass(slots=True)
class Work:
    """What one batch means for the spool."""

    changes: list[Change] = field(default_factory=list)
    begun: list[Prompt] = field(default_factory=list)
    """One for each `Begin` in `changes`."""
    blocks: list[SharedBlock] = field(default_factory=list)
    """One for each `Rows` in `changes`."""

    def rows(self, prompt: Prompt, start: int, copied: CopiedRows) -> None:
        if start == 0:
            self._begin(prompt, prompt.ids.tobytes())
        self.changes.append(Rows(prompt.number, start, copied.block.number, copied.spans))
        self.blocks.append(copied.block)

    def fail(self, prompt: Prompt, reason: str, detail: str) -> None:
        """The first reason stands."""
        if not prompt.over:
            prompt.over = True
            self._begin(prompt, b"")
            self.changes.append(Fail(prompt.number, reason, detail))

    def abandon(self, prompt: Prompt) -> None:
        prompt.over = True
        self.changes.append(Abandon(prompt.number))

    def _begin(self, prompt: Prompt, ids: bytes) -> None:
        self.changes.append(Begin(prompt.number, prompt.rid, ids))
        self.begun.append(prompt)


@dataclass(slots=True)
class _Open:
    """A prompt that the process that writes knows of."""

    prompt: Prompt
    touched: float
    nbytes: int = 0


class Writers:
    """Writes dumps of one scheduler into one spool. `put` is for the scheduler thread.

    `_lock` guards what is known of the process and what it has; it is never held while anything is sent or written.
    """

    def __init__(self, spool: Path, config: SpoolConfig, form: DumpForm, arena: Arena) -> None:
        """Raises OSError when the process cannot be started."""
        self._setup, self._arena = Setup(spool, config, form, len(arena.memory)), arena
        self.counters = Counters()
        self._lock = threading.Lock()
        self._up = threading.Condition(self._lock)
        self._queue: queue.SimpleQueue[tuple[int, list[Change], Any] | None] = queue.SimpleQueue()
        self._open: dict[int, _Open] = {}
        self._blocks: dict[int, SharedBlock] = {}
        self._life = 0
        """Which process it is: what was meant for an earlier one is not sent."""
        self._base = Counters()
        """Of the processes before."""
        self._closing = False
        self.process, self._connection = self._start()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def put(self, work: Work, done: Any) -> None:
        """`done`: an event to `synchronize` with before the rows in `work` may be read, or None."""
        now = time.monotonic()
        with self._lock:
            for prompt in work.begun:
                self._open.setdefault(prompt.number, _Open(prompt, now))
            for change in work.changes:
                if isinstance(change, Rows) and (known := self._open.get(change.number)) is not None:
                    known.touched = now
                    nbytes = sum(end - start for start, end in change.spans[:2])
                    known.nbytes += nbytes
                    self.counters.backlog_bytes += nbytes
            self._blocks.update((block.number, block) for block in work.blocks)
            life = self._life
        self._queue.put((life, work.changes, done))

    def close(self, timeout_s: float = 10.0) -> None:
        """End the process once it has written what it can."""
        with self._up:
            self._closing = True
            self._up.notify_all()
        self._queue.put(None)
        self._threads[0].join(timeout_s)
        with contextlib.suppress(OSError):
            self._connection.send_bytes(pickle.dumps([Close()]))
        self._threads[1].join(timeout_s)
        self.process.kill()
        self.process.wait()

    # ------------------------------------------------------------- threads

    def _send(self) -> None:
        swept = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=SWEEP_S)
                if item is None:
                    return
                try:
                    self._send_one(*item)
                except OSError:
                    logger.debug("eagle3-data: the process that writes is gone", exc_info=True)  # `_receive` acts
            if time.monotonic() - swept > SWEEP_S:
                swept = time.monotonic()
                self._sweep(swept)

    def _send_one(self, life: int, changes: list[Change], done: Any) -> None:
        message = pickle.dumps(changes)  # while the batch is still at work
        if done is not None:
            try:
                done.synchronize()
            except RuntimeError as error:  # of the device: no memory comes back from it
                logger.exception("eagle3-data: a batch's states did not come")
                detail = f"{type(error).__name__}: {error}"
                message = pickle.dumps(
                    [Fail(c.number, "internal", detail) if isinstance(c, Rows) else c for c in changes]
                )
        with self._up:
            while self._connection.closed and not self._closing:
                self._up.wait()
            connection = self._connection if life == self._life else None
        if connection is not None:
            connection.send_bytes(message)

    def _sweep(self, now: float) -> None:
        """Prompts that were aborted between two chunks, or whose rest never came."""
        work = Work()
        with self._lock:
            for known in self._open.values():
                prompt, silent_s = known.prompt, now - known.touched
                if prompt.seen < prompt.tokens and (
                    prompt.request.finished() or silent_s > self._setup.config.temp_age_s
                ):
                    work.fail(prompt, "aborted", f"the request ended after {prompt.seen} of {prompt.tokens} rows")
        if work.changes:
            self.put(work, None)

    def _receive(self) -> None:
        while True:
            try:
                self._note(pickle.loads(self._connection.recv_bytes()))
            except (EOFError, OSError):
                if self._closing:
                    return
                self._died()

    def _note(self, report: Report) -> None:
        with self._lock:
            for number in report.released:
                if self._blocks[number].let_go():
                    del self._blocks[number]
            for number in report.settled:
                self._settle(self._open.pop(number))
            self.counters.written = self._base.written + report.written
            self.counters.failed = self._base.failed + report.failed

    def _settle(self, known: _Open) -> None:
        known.prompt.over = True
        self.counters.backlog_bytes -= known.nbytes

    # ------------------------------------------------------------- the process

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        with theirs:
            files = (theirs.fileno(), self._arena.file)
            command = [sys.executable, "-m", f"{__package__}.writing", *map(str, files)]
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=files)
            except OSError:
                ours.close()
                raise
        connection = Connection(ours.detach())
        connection.send_bytes(pickle.dumps(self._setup))
        return process, connection

    def _died(self) -> None:
        """Error records for all that it had, their memory back, and another process."""
        self.process.kill()
        code = self.process.wait()
        logger.error("eagle3-data: the process that writes dumps ended (exit code %s); starting another", code)
        with self._lock:
            self._connection.close()
            self._life += 1
            orphans, blocks = list(self._open.values()), list(self._blocks.values())
            self._open.clear()
            self._blocks.clear()
            for known in orphans:
                self._settle(known)
            for block in blocks:
                block.drop()
            self.counters.failed += len(orphans)
            self._base = Counters(self.counters.written, self.counters.failed)
        spool, form = self._setup.spool, self._setup.form
        detail = f"the process that writes dumps ended with exit code {code}"
        for known in orphans:
            error = DumpError(rid=known.prompt.rid, reason="internal", detail=detail, instance=form.instance)
            if not os.path.exists(f"{spool}/{error.rid}{DUMP_SUFFIX}"):  # else written, and not yet reported
                write_error(spool, error)
        while not self._closing:
            time.sleep(RESTART_S)
            try:
                process, connection = self._start()
            except OSError as error:
                logger.error("eagle3-data: no process that writes dumps: %s", error)
                continue
            with self._up:
                self.process, self._connection = process, connection
                self._up.notify_all()
            return
