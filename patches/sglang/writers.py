"""The scheduler's side of the process that writes dumps (`writing`): what there is to write goes out, reports come in.

The scheduler thread puts one list per batch into a queue and never waits. One thread waits for the batch's copies and
sends the list on, another takes reports and gives host memory back. Should the process that writes die, its prompts get
error records and another one is started.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from array import array
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from eagle3_data.patches.sglang.arena import Arena, SharedBlock
from eagle3_data.patches.sglang.copier import CopiedRows
from eagle3_data.patches.sglang.dumps import DumpForm, write_error
from eagle3_data.patches.sglang.messages import Abandon, Begin, Change, Close, Fail, Report, Rows, Setup, encode
from eagle3_data.patches.sglang.rows import Prompt
from eagle3_data.protocol import DUMP_SUFFIX, DumpError, SpoolConfig

logger = logging.getLogger(__name__)

SWEEP_S = 5.0
"""How often prompts that will never be complete are looked for."""
RESTART_S = 1.0
"""Between two starts of the process that writes."""
START_S = 60.0
"""A process that has not reported by then will not."""


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
        self._begin(prompt, prompt.ids)
        self.changes.append(Rows(prompt.number, start, copied.block.number, copied.spans))
        self.blocks.append(copied.block)

    def fail(self, prompt: Prompt, reason: str, detail: str) -> None:
        """The first reason stands."""
        if not prompt.over:
            prompt.over = True
            self._begin(prompt, array("i"))
            self.changes.append(Fail(prompt.number, reason, detail))

    def abandon(self, prompt: Prompt) -> None:
        prompt.over = True
        self.changes.append(Abandon(prompt.number))

    def _begin(self, prompt: Prompt, ids: array[int]) -> None:
        """Once: a prompt that the process that writes has settled, unknown to us yet, must not begin again."""
        if not prompt.begun:
            prompt.begun = True
            self.changes.append(Begin.of(prompt.number, prompt.rid, ids))
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
        """Waits until the process is ready. Raises OSError when it cannot be started."""
        self._setup, self._arena = Setup(spool, config, form), arena
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
        self._connection: Connection | None
        """None: there is no process. Closed by the last to let go of it, never while another thread sends."""
        self.process, self._connection = self._start()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def put(self, work: Work, done: Any) -> None:
        """`done`: an event to `synchronize` with before the rows in `work` may be read, or None."""
        with self._lock:
            self._put(work, done)

    def close(self, timeout_s: float = 10.0) -> None:
        """End the process once it has written what it can."""
        with self._up:
            self._closing = True
            self._put(Work([Close()]), None)
            self._queue.put(None)
            self._up.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)
        self.process.kill()
        self.process.wait()

    def _put(self, work: Work, done: Any) -> None:
        """The caller holds the lock: the process that writes is told in the order in which we note."""
        now = time.monotonic()
        for prompt in work.begun:
            self._open[prompt.number] = _Open(prompt, now)
        for change in work.changes:
            if isinstance(change, Rows) and (known := self._open.get(change.number)) is not None:
                known.touched = now
                nbytes = sum(end - start for start, end in change.spans[:2])
                known.nbytes += nbytes
                self.counters.backlog_bytes += nbytes
        self._blocks.update((block.number, block) for block in work.blocks)
        self._queue.put((self._life, work.changes, done))

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
        message = encode(changes)  # while the batch is still at work
        if done is not None:
            try:
                done.synchronize()
            except RuntimeError as error:  # of the device: no memory comes back from it
                logger.exception("eagle3-data: a batch's states did not come")
                detail = f"{type(error).__name__}: {error}"
                message = encode([Fail(c.number, "internal", detail) if isinstance(c, Rows) else c for c in changes])
        with self._up:
            while self._connection is None and life == self._life and not self._closing:
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
                self._put(work, None)

    def _receive(self) -> None:
        connection = self._connection
        while connection is not None:
            try:
                self._note(Report.decode(connection.recv_bytes()))
            except (EOFError, OSError):
                connection = None if self._closing else self._died()

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
        ours, theirs = Pipe()
        with theirs:
            files = (theirs.fileno(), self._arena.file)
            command = [sys.executable, "-m", f"{__package__}.writing", *map(str, files)]
            environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # nothing is imported from the working directory
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=files, env=environment)
        try:
            ours.send_bytes(self._setup.encode())
            if not ours.poll(START_S):
                raise TimeoutError(f"it said nothing for {START_S:.0f} s")
            ours.recv_bytes()  # its first report: it is ready
        except (EOFError, OSError) as error:
            process.kill()
            why = error if isinstance(error, TimeoutError) else "the log has its error"
            raise OSError(f"{why} (exit code {process.wait()})") from error
        return process, ours

    def _died(self) -> Connection | None:
        """Another process, once what this one had is given up; None: we close."""
        self.process.kill()
        reason = f"the process that writes dumps ended with exit code {self.process.wait()}"
        while True:
            logger.error("eagle3-data: %s; starting another", reason)
            self._give_up(reason)
            time.sleep(RESTART_S)
            if self._closing:
                return None
            try:
                process, connection = self._start()
            except OSError as error:
                reason = f"the process that writes dumps could not be started: {error}"
                continue
            with self._up:
                self.process, self._connection = process, connection
                self._up.notify_all()
            return connection

    def _give_up(self, reason: str) -> None:
        """Error records for all that was put so far, and its memory back. There is no process."""
        with self._up:
            self._connection = None
            self._life += 1
            orphans, blocks = list(self._open.values()), list(self._blocks.values())
            self._open.clear()
            self._blocks.clear()
            for known in orphans:
                self._settle(known)
            for block in blocks:
                block.drop()
            self._up.notify_all()
        spool, counters = self._setup.spool, self.counters
        for rid in dict.fromkeys(known.prompt.rid for known in orphans):
            with contextlib.suppress(OSError):
                for half in spool.glob(f".{rid}.{self.process.pid}-*.tmp"):
                    half.unlink(missing_ok=True)
            if os.path.exists(f"{spool}/{rid}{DUMP_SUFFIX}"):  # written, and not yet reported
                counters.written += 1
                continue
            counters.failed += 1
            error = DumpError(rid=rid, reason="internal", detail=reason, instance=self._setup.form.instance)
            if not write_error(spool, error):
                logger.error("eagle3-data: no error record for %s (%s): the spool takes none", rid, reason)
        self._base = Counters(counters.written, counters.failed)
