"""Moving bytes between and inside files: what placing and sealing samples is made of."""

from __future__ import annotations

import os

import xxhash

from eagle3_data.errors import DumpCorrupt

COPY_BYTES = 8 << 20


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """`pwrite` until all is written; a short write is how a full disk can begin."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def copy_range(source: int, source_offset: int, target: int, target_offset: int, count: int) -> None:
    """Move `count` bytes between files inside the kernel. Raises DumpCorrupt at an early end, OSError otherwise."""
    os.lseek(target, target_offset, os.SEEK_SET)
    done = 0
    while done < count:
        # sendfile, not copy_file_range: the latter fails from tmpfs to another file system
        sent = os.sendfile(target, source, source_offset + done, min(count - done, 1 << 30))
        if sent == 0:
            raise DumpCorrupt(f"dump ends {count - done} bytes early")
        done += sent


def digest_range(digest: xxhash.xxh3_128, fd: int, start: int, end: int, back: memoryview) -> None:
    """Feed bytes start..end of a file to the digest by way of `back`, which stays in the processor's cache: mapping the
    pages and unmapping them again costs more than the copy. Raises DumpCorrupt at an early end."""
    while start < end:
        got = os.preadv(fd, [back[: min(len(back), end - start)]], start)
        if got == 0:
            raise DumpCorrupt(f"file ends {end - start} bytes early")
        digest.update(back[:got])
        start += got


def move_left(fd: int, source: int, target: int, count: int) -> None:
    done = 0
    while done < count:
        data = os.pread(fd, min(COPY_BYTES, count - done), source + done)
        if not data:
            raise DumpCorrupt("shard ends early while its gaps are closed")
        write_at(fd, data, target + done)
        done += len(data)
