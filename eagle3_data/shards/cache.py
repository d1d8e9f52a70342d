"""Whole shards of mirrors on the local disk: bounded, shared by processes, oldest use out first, safe to kill.

A shard is kept under its own checksum, so the same shard of two mirrors or revisions is kept once, and bytes that are
not the manifest's never become a cached shard. While it comes in it is a hidden file of its final size (so that every
process counts it), with a note of how far it got: a killed download goes on there. Locks are the kernel's (`flock`),
so that nothing is left locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from eagle3_data.errors import ConfigError, ShardCorrupt
from eagle3_data.manifest import ShardRow
from eagle3_data.shards.fetch import Fetcher
from eagle3_data.shards.layout import remote_path
from eagle3_data.sizes import parse_size

WINDOW_BYTES = 64 << 20
"""Fetched at once, in parallel parts; what a kill can lose."""
MAPPINGS = 8
"""Cached shards this process keeps mapped."""
IDLE_S = 600.0
"""A shard that was used within so many seconds is in use and makes room for no other: two readers of two data sets
would fetch whole shards only to throw out each other's."""
TOUCH_S = 30.0
"""How often a use is noted, and evicted shards are let go: a mapping keeps their bytes on the disk."""
LIMIT_BYTES = 100 * 10**9
FOLDER_VARIABLE = "EAGLE3_DATA_SHARD_CACHE"
SIZE_VARIABLE = "EAGLE3_DATA_SHARD_CACHE_SIZE"
_XXH3 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Where shards of mirrors are kept, and how many bytes of them."""

    folder: Path
    limit_bytes: int

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0:
            raise ConfigError(f"the shard cache's limit must be > 0 bytes, got {self.limit_bytes}")


def choose_cache(folder: str | os.PathLike[str] | None, size: int | str | None) -> CacheConfig | None:
    """What was asked for, else what the environment says; None: no cache. Raises ConfigError for what is no size."""
    folder = folder or os.environ.get(FOLDER_VARIABLE)
    if not folder:
        if size is not None:
            raise ConfigError("a size of the shard cache without its folder", next="name the folder: shard_cache")
        return None
    size = size if size is not None else os.environ.get(SIZE_VARIABLE) or LIMIT_BYTES
    return CacheConfig(Path(folder).expanduser().absolute(), parse_size(size) if isinstance(size, str) else size)


class ShardCache:
    """One process's view of the folder; several processes share it without talking to each other."""

    def __init__(self, config: CacheConfig) -> None:
        self.folder, self.limit_bytes = config.folder, config.limit_bytes
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"shard cache {self.folder}: {error.strerror}", next="another folder, or other permissions"
            ) from error
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._touched: dict[str, float] = {}
        self._lock = threading.Lock()

    def path(self, shard: ShardRow) -> Path:
        if not _XXH3.fullmatch(shard.xxh3):
            raise ShardCorrupt(f"{shard.name}: {shard.xxh3!r} is not a checksum")
        return self.folder / f"{shard.xxh3}.tar"

    def map(self, shard: ShardRow) -> mmap.mmap | None:
        """The shard's bytes when they are here; counts as a use of it."""
        with self._lock:
            self._touch(shard.xxh3)
            found = self._maps.get(shard.xxh3)
            if found is not None:
                self._maps.move_to_end(shard.xxh3)
                return found
            path = self.path(shard)
            try:
                with open(path, "rb") as file:
                    if os.fstat(file.fileno()).st_size != shard.nbytes:
                        return None
                    os.utime(path)
                    found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except FileNotFoundError:
                return None
            self._maps[shard.xxh3] = found
            self._touched[shard.xxh3] = time.monotonic()
            while len(self._maps) > MAPPINGS:
                self._forget(next(iter(self._maps)))
            return found

    def _touch(self, xxh3: str) -> None:
        """Now and then: note the use of a mapped shard, and let go of those that another process evicted."""
        now = time.monotonic()
        if xxh3 not in self._maps or now - self._touched[xxh3] < TOUCH_S:
            return
        self._touched[xxh3] = now
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.folder / f"{xxh3}.tar")
        for mapped in [name for name in self._maps if not (self.folder / f"{name}.tar").exists()]:
            self._forget(mapped)

    def _forget(self, xxh3: str) -> None:
        """The mapping is closed once the last tensor over it is gone."""
        self._maps.pop(xxh3, None)
        self._touched.pop(xxh3, None)

    def get(self, shard: ShardRow, fetcher: Fetcher, keep: frozenset[str] = frozenset()) -> mmap.mmap | None:
        """The shard's bytes, fetched first where they are not here; None when there is no room for it now.

        Shards in `keep` (checksums) and shards in use make no room. Another process (or thread) that fetches it is
        waited for. Raises what `fetcher` raises, ShardCorrupt when what the mirror has is not the manifest's.
        """
        if (found := self.map(shard)) is not None:
            return found
        final = self.path(shard)
        with _locked(final.with_name(f".{final.name}.lock")):
            if (found := self.map(shard)) is not None:
                return found
            part = final.with_name(f".{final.name}.part")
            if not self._reserve(part, shard, keep):
                return None
            self._download(part, shard, fetcher)
            with self._room():  # a walk that counts may see a file that is renamed meanwhile under neither name
                os.replace(part, final)
            _note(part).unlink(missing_ok=True)
        return self.map(shard)

    # ---------------------------------------------------------- room

    def _room(self) -> contextlib.AbstractContextManager[bool]:
        """While it is held no file comes, goes or is renamed, so what is counted is there."""
        return _locked(self.folder / ".room.lock")

    def _reserve(self, part: Path, shard: ShardRow, keep: frozenset[str]) -> bool:
        """Make room and take it: the file gets its final size at once."""
        with self._room():
            if part.exists() and part.stat().st_size == shard.nbytes:
                return True
            part.unlink(missing_ok=True)
            _note(part).unlink(missing_ok=True)
            entries = sorted(self._entries())
            total = sum(size for _, size, _ in entries)
            idle = time.time() - IDLE_S
            for used, size, path in entries:
                if total + shard.nbytes <= self.limit_bytes or used > idle:
                    break
                if _xxh3_of(path) not in keep and self._evict(path):
                    total -= size
            if total + shard.nbytes > self.limit_bytes:
                return False
            with open(part, "wb") as file:
                file.truncate(shard.nbytes)
            return True

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes, path) of everything that takes room."""
        for entry in os.scandir(self.folder):
            if entry.name.endswith((".tar", ".tar.part")):
                with contextlib.suppress(FileNotFoundError):
                    stat = entry.stat()
                    yield stat.st_mtime, stat.st_size, Path(entry.path)

    def _evict(self, path: Path) -> bool:
        """False for a shard that somebody is fetching now."""
        name = path.name.removeprefix(".").removesuffix(".part")
        with _locked(self.folder / f".{name}.lock", wait=False) as free:
            if not free:
                return False
            path.unlink(missing_ok=True)
            _note(path).unlink(missing_ok=True)
            # the lock's file goes with it; whoever holds it open sees that and opens it anew
            (self.folder / f".{name}.lock").unlink(missing_ok=True)
        with self._lock:
            self._forget(_xxh3_of(path))
        return True

    # ---------------------------------------------------------- bytes

    def _download(self, part: Path, shard: ShardRow, fetcher: Fetcher) -> None:
        """Fill `part` from where it stands; a part that an earlier process left and that proves wrong starts anew."""
        begun = _progress(part)
        for start in (begun, 0) if begun else (0,):
            with open(part, "r+b") as file, mmap.mmap(file.fileno(), 0) as target, memoryview(target) as view:
                for low in range(start, shard.nbytes, WINDOW_BYTES):
                    with view[low : low + WINDOW_BYTES] as window:
                        fetcher.read_into(remote_path(shard.name), [(low, window)])
                        end = low + len(window)
                    target.flush()
                    _note(part).write_text(str(end))
                digest = xxhash.xxh3_128_hexdigest(view)
            if digest == shard.xxh3:
                return
        part.unlink(missing_ok=True)
        _note(part).unlink(missing_ok=True)
        raise ShardCorrupt(
            f"{shard.name} of {fetcher.url}: what came does not give the manifest's checksum",
            next="the mirror's copy is damaged; push it again",
        )


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """The kernel's lock on `path`; False, at once, when `wait` is off and somebody has it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            if not _same(file, path):
                continue  # removed by an eviction while we waited
            yield True
            return
        finally:
            os.close(file)


def _same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _xxh3_of(path: Path) -> str:
    return path.name.removeprefix(".").removesuffix(".part").removesuffix(".tar")


def _note(part: Path) -> Path:
    return part.with_name(f"{part.name}.done")


def _progress(part: Path) -> int:
    try:
        return int(_note(part).read_text())
    except (FileNotFoundError, ValueError):
        return 0
