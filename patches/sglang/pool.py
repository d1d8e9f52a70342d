"""Threads that write dumps, in the process that has no other work (see `writing`).

One dump is worked on by one thread at a time, so its rows are written, and summed, in order. Above the high-water mark
no new file is begun; files already begun go on, since the client frees space only by taking whole dumps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from eagle3_data.patches.sglang.dumps import Dump, DumpFile, DumpForm, HostRows, write_error
from eagle3_data.protocol import DUMP_SUFFIX, ERROR_SUFFIX, DumpError, SpoolConfig

logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""How long a look at the spool's size is believed; also how often waiting writers look again."""
SWEEP_S = 5.0
"""How often files that nobody writes or takes any more are looked for."""


class WriterPool:
    """Writes dumps of one scheduler into one spool. Thread-safe.

    `_changed` guards everything but the files, and is never held during I/O.
    """

    def __init__(
        self, spool: Path, config: SpoolConfig, form: DumpForm, on_settled: Callable[[Dump], None] = lambda _dump: None
    ) -> None:
        """`on_settled` is called, by any thread, when a dump is written, failed or dropped."""
        self._spool, self._config, self._form, self._on_settled = spool, config, form, on_settled
        self.written = self.failed = 0
        self._changed = threading.Condition()
        self._begun: deque[Dump] = deque()
        """Dumps with work and a file, or with a file to remove: these never wait for room."""
        self._new: deque[Dump] = deque()
        """Dumps with work and no file yet."""
        self._live: dict[int, Dump] = {}
        self._closing = False
        self._looked, self._spool_bytes = -LOOK_S, 0
        self._swept = time.monotonic()
        self._threads = [
            threading.Thread(target=self._work, name=f"eagle3-writer-{i}", daemon=True) for i in range(config.writers)
        ]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------- whoever has work

    def add(self, dump: Dump, start: int, rows: HostRows) -> None:
        """Queue rows of a prompt. They are given back at once if it has failed or was abandoned meanwhile."""
        with self._changed:
            over = self._over(dump)
            if not over:
                dump.held_bytes += len(rows.aux) + len(rows.last)
                dump.pending.append((start, rows))
                self._enqueue(dump)
        if over:
            rows.release()

    def fail(self, dump: Dump, reason: str, detail: str) -> None:
        """Leave an error record instead of a dump; the first reason stands."""
        with self._changed:
            self._fail(dump, reason, detail)

    def abandon(self, dump: Dump) -> None:
        """The same request started again: drop what there is of this dump, without a record."""
        with self._changed:
            if not dump.settled:
                dump.abandoned = True
                self._enqueue(dump)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the threads once nothing is left that they can write."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------------- caller holds the lock

    def _over(self, dump: Dump) -> bool:
        return dump.abandoned or dump.failed is not None or dump.settled

    def _fail(self, dump: Dump, reason: str, detail: str) -> None:
        if not self._over(dump):
            dump.failed = DumpError(rid=dump.rid, reason=reason, detail=detail, instance=self._form.instance)
            self._enqueue(dump)

    def _enqueue(self, dump: Dump) -> None:
        self._live[id(dump)] = dump
        waits_for_room = dump.file is None and not self._over(dump)
        if not dump.queued:
            dump.queued = True
            (self._new if waits_for_room else self._begun).append(dump)
        elif not waits_for_room and dump in self._new:  # its memory must not wait for room it will never need
            self._new.remove(dump)
            self._begun.append(dump)
        self._changed.notify()

    def _forget(self, dump: Dump) -> None:
        dump.held_bytes = 0
        self._live.pop(id(dump), None)

    def _look_is_old(self) -> bool:
        return time.monotonic() - self._looked > LOOK_S

    def _room(self) -> bool:
        begun = sum(dump.tokens for dump in self._live.values() if dump.file is not None) * self._form.row_bytes
        return self._spool_bytes + begun < self._config.high_water_bytes

    # ------------------------------------------------------------- writer threads

    def _work(self) -> None:
        while (dump := self._take()) is not None:
            try:
                self._advance(dump)
            except OSError as error:
                self._give_up(dump, "disk", f"{error.strerror or error} in {self._spool}")
            except Exception as error:
                logger.exception("eagle3-data: writing %s failed", dump.rid)
                self._give_up(dump, "internal", f"{type(error).__name__}: {error}")

    def _take(self) -> Dump | None:
        """The next dump to work on, or None when the pool closes."""
        while True:
            self._look()
            with self._changed:
                if self._begun:
                    return self._begun.popleft()
                if self._new and self._look_is_old():
                    continue  # never begin a file on what the spool looked like some time ago
                if self._new and self._room():
                    return self._new.popleft()
                if self._closing:
                    return None
                self._changed.wait(LOOK_S if self._new else SWEEP_S)

    def _look(self) -> None:
        """Refresh what is known of the spool, when that is due."""
        if self._new and self._look_is_old():
            found = finished_bytes(self._spool)
            with self._changed:
                self._looked, self._spool_bytes = time.monotonic(), found
        now = time.monotonic()
        if now - self._swept > SWEEP_S:
            self._swept = now
            remove_stale(self._spool, self._config.temp_age_s, self._config.dump_age_s)

    def _advance(self, dump: Dump) -> None:
        """Write what is pending of one dump. Raises OSError."""
        while True:
            with self._changed:
                over = self._over(dump)
                if not over and not dump.pending:
                    dump.queued = False
                    return
                start, rows = (0, None) if over else dump.pending.popleft()
            if rows is None:
                self._drop(dump)
                return
            try:
                self._write(dump, start, rows)
            finally:
                rows.release()

    def _write(self, dump: Dump, start: int, rows: HostRows) -> None:
        if dump.file is None:
            dump.file = DumpFile(self._spool, dump.rid, dump.ids, self._form)
        dump.file.add(start, rows)
        if dump.file.written < dump.tokens:
            return
        with self._changed:
            if self._over(dump):
                return  # the next turn of `_advance` drops it
            dump.settled = True  # from here on nobody else decides what becomes of it
        try:
            dump.file.publish()
        except BaseException:
            dump.settled = False
            raise
        with self._changed:
            self.written += 1
            self._spool_bytes += dump.held_bytes
            self._forget(dump)
        with contextlib.suppress(OSError):  # an earlier try of the same request may have left one
            os.unlink(f"{self._spool}/{dump.rid}{ERROR_SUFFIX}")
        self._on_settled(dump)

    def _give_up(self, dump: Dump, reason: str, detail: str) -> None:
        with self._changed:
            self._fail(dump, reason, detail)
        self._drop(dump)

    def _drop(self, dump: Dump) -> None:
        """Remove every trace of a dump, except the error record if it has one to leave."""
        with self._changed:
            if dump.settled:
                return
            dump.settled = True
            held = [rows for _, rows in dump.pending]
            dump.pending.clear()
            self._forget(dump)
            error = None if dump.abandoned else dump.failed
            self.failed += error is not None
        for rows in held:
            rows.release()
        if dump.file is not None:
            dump.file.discard()
        if error is not None and not write_error(self._spool, error):
            logger.error("eagle3-data: no error record for %s (%s): the spool takes none", dump.rid, error.detail)
        self._on_settled(dump)


def finished_bytes(spool: Path) -> int:
    """Bytes of the dumps that lie in the spool under their final name; 0 when it is gone, which writing will show."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(spool) as entries:
        for entry in entries:
            if entry.name.endswith(DUMP_SUFFIX) and not entry.name.startswith("."):
                with contextlib.suppress(OSError):  # the client has just taken it
                    total += entry.stat().st_size
    return total


def remove_stale(spool: Path, temp_age_s: float, dump_age_s: float) -> None:
    """Remove hidden files of ours that nobody has written to (a server that was killed), and dumps that nobody took.

    A client that shares the folder tidies it itself; what a killed client on another machine left is for us alone.
    """
    now = time.time()
    with contextlib.suppress(OSError), os.scandir(spool) as entries:
        for entry in entries:
            if entry.name.startswith(".e3d-") and entry.name.endswith(".tmp"):
                age_s = temp_age_s
            elif entry.name.startswith("e3d-") and entry.name.endswith((DUMP_SUFFIX, ERROR_SUFFIX)):
                age_s = dump_age_s
            else:
                continue
            with contextlib.suppress(OSError):
                if entry.stat().st_mtime < now - age_s:
                    os.unlink(entry.path)
