"""Writing files so that a crash leaves the old one or the new one, and a power cut too."""

from __future__ import annotations

import os
from pathlib import Path


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
