"""Host memory for copies from the device: one piece, pinned once at the start, handed out in blocks.

It has no name and no place in a file system (/dev/shm is small in containers); the process that writes dumps sees it
through its file descriptor.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import os
import threading
import weakref
from typing import Any

import torch

ALIGN = 512
"""Blocks and tensors in the arena start at multiples of this many bytes."""

Block = tuple[int, int]
"""(start, end) in the arena, in bytes."""


class Arena:
    """Host memory of a fixed size, handed out in blocks, first fit. Thread-safe; no call waits for a copy."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        """Raises RuntimeError when so much cannot be taken, or pinned."""
        nbytes = nbytes // ALIGN * ALIGN
        try:
            self.file = os.memfd_create("eagle3-arena", os.MFD_CLOEXEC)
            os.ftruncate(self.file, nbytes)
            populate = mmap.MAP_POPULATE if pinned else 0  # a page is pinned where it is
            self.memory = torch.frombuffer(
                mmap.mmap(self.file, nbytes, flags=mmap.MAP_SHARED | populate), dtype=torch.uint8
            )
        except (OSError, ValueError) as error:
            raise RuntimeError(f"no shared memory: {error}") from error
        weakref.finalize(self, os.close, self.file)
        if pinned:
            _pin(self.memory)
            weakref.finalize(self, _unpin, self.memory.data_ptr()).atexit = False  # the device may be gone by then
        self._free: list[Block] = [(0, len(self.memory))]
        """Gaps, ascending, never touching each other."""
        self._limbo: list[tuple[Block, Any]] = []
        """Blocks given back while the copy into them was still on its way."""
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes`, or None when no gap is large enough."""
        nbytes = aligned(nbytes)
        with self._lock:
            self._end_limbo()
            for i, (start, end) in enumerate(self._free):
                if end - start >= nbytes:
                    self._free[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                    return start, start + nbytes
        return None

    def give_back(self, block: Block, event: Any) -> None:
        """Free a block, now or once `event` (None: at once) has come to pass."""
        with self._lock:
            if event is None or event.query():
                self._insert(block)
            else:
                self._limbo.append((block, event))

    def free_bytes(self) -> int:
        with self._lock:
            self._end_limbo()
            return sum(end - start for start, end in self._free)

    def _end_limbo(self) -> None:
        ended = [block for block, event in self._limbo if event.query()]
        if ended:
            self._limbo = [(block, event) for block, event in self._limbo if block not in ended]
            for block in ended:
                self._insert(block)

    def _insert(self, block: Block) -> None:
        start, end = block
        i = bisect.bisect(self._free, block)
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, end))


_numbers = itertools.count()


class SharedBlock:
    """A block of the arena that the prompts of one batch share; the last one to let go gives it back. Thread-safe."""

    def __init__(self, arena: Arena, block: Block, holders: int, event: Any) -> None:
        self.number = next(_numbers)
        self._arena, self._block, self._event = arena, block, event
        self._holders, self._lock = holders, threading.Lock()

    def let_go(self) -> bool:
        """One holder less; True from the last one."""
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._arena.give_back(self._block, self._event)
        return last

    def drop(self) -> None:
        """Nobody holds it any more."""
        self._arena.give_back(self._block, self._event)


def aligned(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGN


def _pin(memory: torch.Tensor) -> None:
    runtime = _runtime()
    code = runtime.cudaHostRegister(memory.data_ptr(), len(memory), 0)
    if int(code) != 0:
        raise RuntimeError(runtime.cudaGetErrorString(code))


def _unpin(address: int) -> None:
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    cuda: Any = torch.cuda  # `cudart` has no types
    return cuda.cudart()
