"""The process that writes one scheduler's dumps: `python -m eagle3_data.patches.sglang.writing SOCKET ARENA`.

SOCKET and ARENA are file descriptors. Threads that wrote in the scheduler's own process would want Python's lock just
when a batch ends; that is when the scheduler sends answers, takes new prompts and launches them, and when batches are
small the GPU has nothing to do until it has. This process ends with the scheduler, whatever is left to write then.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from eagle3_data.patches.sglang.dumps import Dump
from eagle3_data.patches.sglang.messages import Abandon, Begin, Close, Fail, Report, Rows, Setup, decode
from eagle3_data.patches.sglang.pool import WriterPool

REPORT_S = 0.02
"""Reports are gathered for so long: each of them costs the scheduler's process a moment."""
PARENT_S = 1.0
"""How often it is looked whether the scheduler is still there; usually its end of the socket tells."""


class ArenaRows:
    """Rows of one prompt in the arena; see `dumps.HostRows`."""

    def __init__(self, memory: memoryview, rows: Rows, on_release: Callable[[int], None]) -> None:
        self._block, self._on_release, self._held = rows.block, on_release, True
        self.aux, self.last, self._finite, self._token = (memory[start:end] for start, end in rows.spans)

    def finite(self) -> bool:
        return 0 not in bytes(self._finite)

    def next_token(self) -> int:
        return int.from_bytes(self._token, sys.byteorder, signed=True)

    def release(self) -> None:
        if self._held:
            self._held = False
            self.aux = self.last = self._finite = self._token = memoryview(b"")
            self._on_release(self._block)


class Writing:
    """Does what the scheduler's process says, and reports."""

    def __init__(self, connection: Connection, setup: Setup, arena: memoryview) -> None:
        self._connection, self._arena = connection, arena
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._news = threading.Event()
        self._report = Report()
        self._dumps: dict[int, Dump] = {}
        self._pool = WriterPool(setup.spool, setup.config, setup.form, self._settled)

    def run(self) -> None:
        """Until the scheduler closes, or is gone. Raises EOFError or OSError when it is gone."""
        self._send()  # the first report says that we are ready
        while True:
            for change in decode(self._connection.recv_bytes()):
                if isinstance(change, Close):
                    self._pool.close()
                    self._send()
                    return
                self._apply(change)

    def report_forever(self, parent: int) -> None:
        while os.getppid() == parent:
            if self._news.wait(PARENT_S):
                time.sleep(REPORT_S)
                self._news.clear()
                try:
                    self._send()
                except OSError:  # it closes: `run` sees the same
                    return
        os._exit(0)

    def _apply(self, change: Begin | Rows | Fail | Abandon) -> None:
        if isinstance(change, Begin):
            with self._lock:
                self._dumps[change.number] = Dump(change.rid, change.ids_array(), change.number)
            return
        with self._lock:
            dump = self._dumps.get(change.number)
        if isinstance(change, Rows):
            if dump is None:
                self._released(change.block)
            else:
                self._pool.add(dump, change.start, ArenaRows(self._arena, change, self._released))
        elif dump is not None:
            if isinstance(change, Fail):
                self._pool.fail(dump, change.reason, change.detail)
            else:
                self._pool.abandon(dump)

    def _released(self, block: int) -> None:
        with self._lock:
            self._report.released.append(block)
        self._news.set()

    def _settled(self, dump: Dump) -> None:
        with self._lock:
            del self._dumps[dump.number]
            self._report.settled.append(dump.number)
        self._news.set()

    def _send(self) -> None:
        with self._sending:
            with self._lock:
                report, self._report = self._report, Report()
            report.written, report.failed = self._pool.written, self._pool.failed
            self._connection.send_bytes(report.encode())


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the scheduler decides when it ends
        signal.signal(ignored, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(message)s")
    parent = os.getppid()
    connection = Connection(int(sys.argv[1]))
    setup = Setup.decode(connection.recv_bytes())
    with mmap.mmap(int(sys.argv[2]), 0, prot=mmap.PROT_READ) as arena:
        writing = Writing(connection, setup, memoryview(arena))
        threading.Thread(target=writing.report_forever, args=(parent,), daemon=True).start()
        with contextlib.suppress(EOFError, OSError):
            writing.run()
        os._exit(0)  # views of the arena, and threads that wait for a disk, must not keep it


if __name__ == "__main__":
    main()
