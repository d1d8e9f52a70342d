"""One dump file: written under a hidden name, rows in order, renamed when every row is there.

T tokens, L aux layers, W width. Rows are `pwrite`n at their place, so chunks need no concatenation, and never through a
memory map: on a full tmpfs that is a bus error. A prompt in one piece is one write.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from eagle3_data.protocol import (
    DTYPE_BYTES,
    DUMP_SUFFIX,
    ERROR_SUFFIX,
    DumpError,
    DumpMeta,
    dump_tensors,
    ids_digest,
    safetensors_header,
)

MODE = 0o660
"""Of dumps and error records: the spool's group (setgid) reads and deletes them."""

_serial = itertools.count()


class HostRows(Protocol):
    """Some rows of one prompt in host memory."""

    aux: memoryview
    """bytes of [rows, L*W]"""
    last: memoryview
    """bytes of [rows, W]"""

    def finite(self) -> bool:
        """No NaN or Inf in these rows."""

    def next_token(self) -> int:
        """Top-1 token after the last of these rows."""

    def release(self) -> None:
        """Give the host memory back. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class DumpForm:
    """What all dumps of one server have in common."""

    layers: tuple[int, ...]
    width: int
    dtype: str
    instance: str
    norm: str = "post"

    @property
    def row_bytes(self) -> int:
        """Bytes of aux and last state per token."""
        return (len(self.layers) + 1) * self.width * DTYPE_BYTES[self.dtype]

    def header(
        self,
        rid: str,
        tokens: int,
        *,
        ids_digest: str,
        next_token: int,
        finite: bool,
        checksum: str,
        reserve: int = 0,
    ) -> bytes:
        """The header of a dump; see `safetensors_header`.

        Most of it is every dump's: made anew, JSON would take longer than all the rest of a short dump. What is its own
        needs no escapes: an id has the form of `protocol.RID`.
        """
        strings = _shared_strings(self) | {
            "rid": f'"{rid}"',
            "tokens": str(tokens),
            "ids_digest": f'"{ids_digest}"',
            "next_token": str(next_token),
            "finite": "true" if finite else "false",
            "checksum": f'"{checksum}"',
        }
        tensors = dump_tensors(tokens=tokens, num_aux=len(self.layers), width=self.width, dtype=self.dtype)
        return safetensors_header(tensors, strings, reserve=reserve)

    def header_bytes(self, rid: str) -> int:
        """What no header of a dump with an id of this length exceeds."""
        return _longest_header(self, len(rid))


@functools.lru_cache(maxsize=8)
def _shared_strings(form: DumpForm) -> dict[str, str]:
    """Metadata of any dump of this form; its own fields are put in their places."""
    meta = DumpMeta(
        rid="",
        tokens=0,
        ids_digest="",
        layers=form.layers,
        width=form.width,
        dtype=form.dtype,
        norm=form.norm,
        next_token=0,
        finite=False,
        checksum="",
        instance=form.instance,
    )
    return meta.to_strings()


@functools.lru_cache(maxsize=64)
def _longest_header(form: DumpForm, rid_length: int) -> int:
    sums, most = "0" * 32, 2**31 - 1
    return len(
        form.header("x" * rid_length, most, ids_digest=sums, next_token=most, finite=False, checksum=f"{sums}:{sums}")
    )


class Dump:
    """One prompt on its way into the spool. Belongs to the writer pool, under its lock."""

    def __init__(self, rid: str, ids: array[int], number: int = 0) -> None:
        self.rid, self.ids, self.number = rid, ids, number
        self.abandoned = False
        """The same request started again: no record, no file. Never cleared."""
        self.failed: DumpError | None = None
        self.pending: deque[tuple[int, HostRows]] = deque()
        self.queued = False
        self.settled = False
        self.held_bytes = 0
        self.file: DumpFile | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids)


class DumpFile:
    """The file of one dump. Every method may raise OSError; then `discard` it."""

    def __init__(self, spool: Path, rid: str, ids: array[int], form: DumpForm) -> None:
        self._ids, self._form = ids, form
        tokens, aux_row = len(ids), len(form.layers) * form.width * DTYPE_BYTES[form.dtype]
        self._aux_row, self._last_row = aux_row, form.width * DTYPE_BYTES[form.dtype]
        self._rid = rid
        self._reserve = form.header_bytes(rid)  # its gap comes first, the header itself is written last
        self._last_at = self._reserve + tokens * self._aux_row
        self._ids_at = self._last_at + tokens * self._last_row
        self._sums = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._finite, self.written = True, 0
        folder = os.fspath(spool)
        self._hidden = f"{folder}/.{rid}.{os.getpid()}-{next(_serial)}.tmp"
        self._final = f"{folder}/{rid}{DUMP_SUFFIX}"
        self._file = os.open(self._hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
        try:
            os.fchmod(self._file, MODE)  # the umask does not decide who may read the spool
        except OSError:
            self.discard()
            raise

    def add(self, start: int, rows: HostRows) -> None:
        """Write the next rows; `start` must be the number of rows written so far."""
        if start != self.written:
            raise AssertionError(f"{self._rid}: rows from {start} after {self.written}")
        self._see(rows)
        if self.written == len(self._ids) and start == 0:  # the whole prompt: one call
            pieces = [memoryview(self._header(rows.next_token())), rows.aux, rows.last, self._id_bytes()]
            _pwrite(self._file, pieces, 0)
            self._close()
            return
        if start == 0:
            os.posix_fallocate(self._file, 0, self._ids_at + 4 * len(self._ids))  # a full disk shows now, not half way
        _pwrite(self._file, [rows.aux], self._reserve + start * self._aux_row)
        _pwrite(self._file, [rows.last], self._last_at + start * self._last_row)
        if self.written == len(self._ids):
            _pwrite(self._file, [self._id_bytes()], self._ids_at)
            _pwrite(self._file, [memoryview(self._header(rows.next_token()))], 0)
            self._close()

    def publish(self) -> None:
        """Give the whole file its name: a reader never sees less."""
        os.rename(self._hidden, self._final)

    def _see(self, rows: HostRows) -> None:
        self._sums[0].update(rows.aux)
        self._sums[1].update(rows.last)
        self._finite &= rows.finite()
        self.written += len(rows.last) // self._last_row

    def _header(self, next_token: int) -> bytes:
        aux, last = self._sums
        return self._form.header(
            self._rid,
            len(self._ids),
            ids_digest=ids_digest(self._ids),
            next_token=next_token,
            finite=self._finite,
            checksum=f"{aux.hexdigest()}:{last.hexdigest()}",
            reserve=self._reserve,
        )

    def _id_bytes(self) -> memoryview:
        return memoryview(self._ids).cast("B")

    def _close(self) -> None:
        file, self._file = self._file, -1
        os.close(file)

    def discard(self) -> None:
        """Close and remove the hidden file; never raises."""
        with contextlib.suppress(OSError):
            if self._file >= 0:
                self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._hidden)


def write_error(spool: Path, error: DumpError) -> bool:
    """Leave `{rid}.error.json`; False when even that was not possible (the client then waits for its deadline)."""
    hidden = spool / f".{error.rid}.{os.getpid()}-{next(_serial)}.tmp"
    try:
        file = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
        try:
            os.fchmod(file, MODE)
            _pwrite(file, [memoryview(error.to_json().encode())], 0)
        finally:
            os.close(file)
        os.rename(hidden, spool / f"{error.rid}{ERROR_SUFFIX}")
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(hidden)
        return False
    return True


def _pwrite(file: int, pieces: Sequence[memoryview], at: int) -> None:
    """Write the pieces one after the other from `at` on."""
    left = [piece for piece in pieces if piece]
    while left:
        done = os.pwritev(file, left, at)  # at most 2 GiB a call
        at += done
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if left:
            left[0] = left[0][done:]
