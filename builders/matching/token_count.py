"""Dumps without identity, as an older patch writes them: folders `req_*`, each with one safetensors file of states.

The count of rows is the whole proof, so it must be unambiguous: what lies in the spool at the start is never a
candidate; two requests of one length are never in flight on one server; after a timeout that length stays closed until
its late dump has come (and been thrown away) or the server is idle. The manifest records the weaker matching.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path

import torch
import xxhash

from eagle3_data.builders.dumps import Dump, Request
from eagle3_data.builders.matching import Strength
from eagle3_data.builders.spool import POLL_S
from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import ConfigError, DumpCorrupt, DumpMismatch, DumpMissing, NonFinite, ShardCorrupt
from eagle3_data.protocol import AUX, LAST
from eagle3_data.shards.reader import parse_header

PATTERN = "req_*"
IDLE_S = 10.0
"""With nothing of ours in flight for this long, a server that is ours alone is idle: a missing dump never comes."""
NO_TOKEN = -1
"""`next_token` of a sample whose dump did not carry it."""


class TokenCountMatcher:
    """`folder`: the spool of one server. Foreign requests on that server would be adopted: it must be ours alone."""

    strength: Strength = "token_count"

    def __init__(self, folder: Path, spec: CaptureSpec) -> None:
        self.folder, self.spec = folder, spec
        self._stale = {path.name for path in folder.glob(PATTERN)}
        self._open: set[int] = set()
        self._late: set[int] = set()
        self._taken: dict[str, Path] = {}
        self._active = time.monotonic()

    @property
    def stale(self) -> int:
        """Dumps that lay here at the start; none is ever taken."""
        return len(self._stale)

    def may_send(self, tokens: int) -> bool:
        if tokens in self._late:
            self._collect_late()
            if not self._open and time.monotonic() - self._active > IDLE_S:
                self._stale |= {path.name for path in self.folder.glob(PATTERN)}
                self._late.clear()
        return tokens not in self._open and tokens not in self._late

    def sent(self, request: Request) -> None:
        if request.tokens in self._open:
            raise AssertionError(f"two requests of {request.tokens} tokens in flight")
        self._open.add(request.tokens)

    async def take(self, request: Request, deadline_s: float) -> Dump:
        end = time.monotonic() + deadline_s
        while True:
            for path, tokens in self._candidates():
                if tokens == request.tokens:
                    self._taken[str(request.rid)] = path.parent
                    return await asyncio.to_thread(open_plain, path, request, self.spec)
            if time.monotonic() >= end:
                raise DumpMissing(f"no dump of {request.tokens} tokens {deadline_s:.0f} s after the response")
            await asyncio.sleep(POLL_S)

    async def drop(self, request: Request, *, came: bool) -> None:
        self._open.discard(request.tokens)
        self._active = time.monotonic()
        folder = self._taken.pop(str(request.rid), None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        elif not came:
            self._late.add(request.tokens)

    def _candidates(self) -> list[tuple[Path, int]]:
        """(file, rows) of every whole dump that is not stale."""
        found = []
        for folder in self.folder.glob(PATTERN):
            if folder.name in self._stale:
                continue
            for path in folder.iterdir():
                if path.suffix in (".pt", ".pth", ".ckpt", ".pkl"):
                    raise ConfigError(
                        f"{path} is a pickle; pickles are never read",
                        next="use the eagle3-data plugin, or a patch that writes safetensors",
                    )
                if path.suffix == ".safetensors" and (tokens := _rows(path)) is not None:
                    found.append((path, tokens))
        return found

    def _collect_late(self) -> None:
        for path, tokens in self._candidates():
            if tokens in self._late:
                shutil.rmtree(path.parent, ignore_errors=True)
                self._late.discard(tokens)


def _rows(path: Path) -> int | None:
    """Rows of the aux tensor; None while the file is not whole."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return parse_header(file.read(1 << 16), size)[AUX][1][0]
    except (ShardCorrupt, OSError, KeyError, IndexError):
        return None


def open_plain(path: Path, request: Request, spec: CaptureSpec) -> Dump:
    """Checks widths, dtype and finiteness here, since nobody else did. Raises DumpMismatch, NonFinite, DumpCorrupt."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        size = os.fstat(fd).st_size
        data = bytearray(os.pread(fd, size, 0))
        if len(data) != size:
            raise DumpCorrupt(f"{path} was cut while it was read")
        tensors = parse_header(data, size)
        digests = []
        for name, width in ((AUX, len(spec.layers) * spec.width), (LAST, spec.width)):
            dtype, shape, low, high = tensors[name]
            if dtype != getattr(torch, spec.dtype) or shape != [request.tokens, width]:
                raise DumpMismatch(
                    f"{path}: {name} is {dtype} {shape}, expected {spec.dtype} [{request.tokens}, {width}]"
                )
            if (
                not torch.frombuffer(data, dtype=dtype, count=(high - low) // dtype.itemsize, offset=low)
                .isfinite()
                .all()
            ):
                raise NonFinite(f"{path}: NaN or Inf in {name}")
            digests.append(xxhash.xxh3_128_hexdigest(memoryview(data)[low:high]))
        if tensors[LAST][2] != tensors[AUX][3]:
            raise DumpCorrupt(f"{path}: its state tensors do not touch each other")
        return Dump(fd, tensors[AUX][2], NO_TOKEN, ":".join(digests), "")
    except BaseException:
        os.close(fd)
        raise
