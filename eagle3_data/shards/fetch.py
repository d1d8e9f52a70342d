"""Ranges of remote files into given memory: in parallel parts, each tried again from the byte where it broke off."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from eagle3_data.errors import DatasetUnavailable
from eagle3_data.patience import Patience, Tries
from eagle3_data.shards.http import TransientError
from eagle3_data.shards.sources import Access, Source, open_source

PART_BYTES = 8 << 20
"""One request asks for at most this much."""
CONNECTIONS = 8
MAX_SMALL_BYTES = 1 << 30
"""Manifest and index of a mirror; 5,000 shards with 37,000 samples take 5 MB."""
OPENING = Patience(first_s=0.5, longest_s=15.0, total_s=60.0)
"""Of the first look at a mirror, while somebody watches."""
READING = Patience(first_s=0.5, longest_s=60.0, total_s=600.0)
"""Of every later read: given up after ten minutes without a byte, or when the mirror asks for a longer wait."""


class Fetcher:
    """Reads one mirror. Threads may share one; after a fork each process makes its own connections and threads."""

    def __init__(self, url: str, access: Access | None = None, patience: Patience | None = None) -> None:
        self._access, self._patience = access or Access(), patience or READING
        self.source: Source = open_source(url, self._access)
        self._pool: ThreadPoolExecutor | None = None
        self._pid, self._lock = os.getpid(), threading.Lock()
        self.bytes_received = 0

    @property
    def url(self) -> str:
        return self.source.url

    def read(self, path: str) -> bytes:
        """A whole small file. Raises DatasetUnavailable when it is not there or larger than MAX_SMALL_BYTES."""
        tries = Tries(self._patience)
        while True:
            try:
                data = self._read_once(path)
                self._count(len(data))
                return data
            except TransientError as error:
                self._wait(path, error, tries)

    def _read_once(self, path: str) -> bytes:
        with contextlib.closing(self.source.open(path)) as body:
            if body.length is not None and body.length > MAX_SMALL_BYTES:
                raise DatasetUnavailable(f"{self.url}/{path} has {body.length:,} bytes; that is not a build's")
            size, pieces, total = body.length, [], 0
            while True:
                piece = bytearray(1 << 20)
                count = body.receive(memoryview(piece))
                total += count
                if not count:
                    break
                if total > MAX_SMALL_BYTES:
                    raise DatasetUnavailable(f"{self.url}/{path} does not end; that is not a build's")
                pieces.append(bytes(piece[:count]))
            if size is not None and total != size:
                raise TransientError(f"{total} of {size} bytes came")
            return b"".join(pieces)

    def read_into(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each view with the file's bytes from its offset.

        Raises DatasetUnavailable when the mirror stays away, ShardCorrupt when the file is too short.
        """
        parts = [
            (start + at, view[at : at + PART_BYTES]) for start, view in ranges for at in range(0, len(view), PART_BYTES)
        ]
        if len(parts) == 1:
            self._part(path, *parts[0])
            return
        waiting = [self._threads().submit(self._part, path, start, view) for start, view in parts]
        done, rest = wait(waiting, return_when=FIRST_EXCEPTION)
        for future in rest:
            future.cancel()
        wait(rest)  # nobody writes into the caller's memory after this
        for future in done:
            future.result()

    def _part(self, path: str, start: int, view: memoryview) -> None:
        done, tries = 0, Tries(self._patience)
        while done < len(view):
            try:
                with contextlib.closing(self.source.open(path, start + done, start + len(view))) as body:
                    while done < len(view):
                        count = body.receive(view[done:])
                        if not count:
                            raise TransientError(f"the connection ended after {done} of {len(view)} bytes")
                        done += count
                        tries.progress()
            except TransientError as error:
                self._wait(path, error, tries)
        self._count(len(view))

    def _wait(self, path: str, error: TransientError, tries: Tries) -> None:
        """Until the next try. Raises DatasetUnavailable when there is none."""
        wait = tries.next_wait(error.wait_s)
        if wait is None:
            raise DatasetUnavailable(
                f"{self.url}/{path}: {error} ({tries.failures} tries in a row)", next="check the network and the mirror"
            ) from error
        self._patience.wait(wait)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_received += nbytes

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                self._pool, self._pid = ThreadPoolExecutor(CONNECTIONS, "eagle3-fetch"), os.getpid()
            return self._pool
