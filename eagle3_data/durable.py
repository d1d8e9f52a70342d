"""Writing files so that a crash leaves the old one or the new one, and a power cut too."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from eagle3_data.errors import DiskFull

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """Whether it says that a disk has no space left: a reason to wait, not to end."""
    return isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in NO_SPACE)


@contextlib.contextmanager
def full_disk_is_said(folder: Path) -> Iterator[None]:
    """A full disk where nothing can wait for space, as before the first request: DiskFull, with what to do next."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFull(
            f"no space for {error.filename or folder}", next="free some, then repeat the command: it goes on from here"
        ) from error


def fsync_dir(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def hidden(path: Path) -> Path:
    """The temporary name beside `path`; hidden names are skipped by every reader of our folders."""
    return path.with_name(f".{path.name}.tmp")


def replace(path: Path) -> None:
    """Move the finished `hidden(path)` over `path`: fsync, rename, fsync of the folder."""
    temporary = hidden(path)
    fsync_file(temporary)
    os.replace(temporary, path)
    fsync_dir(path.parent)


def write_text(path: Path, text: str) -> None:
    """Atomic and durable replacement of a small file."""
    hidden(path).write_text(text)
    replace(path)


class Lines:
    """Appends whole lines to a file. On a full disk the file stays as it was, so that the same line can come again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, line: str) -> None:
        """Raises DiskFull, with nothing written."""
        data, before = line.encode(), os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            os.ftruncate(self._fd, before)
            if is_full(error):
                raise DiskFull(f"no space for {self.path}") from error
            raise

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
