"""A local copy of a mirror: shard by shard, each going on at the byte where it stopped, each checked before its name.

A shard is written as `.{name}.pull`, compared with the manifest's checksum, made durable and renamed. The manifest is
last, so that a folder is a build only once all of its shards are there. `.build/pull.jsonl` remembers what was checked.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from eagle3_data import durable
from eagle3_data.card import CARD
from eagle3_data.errors import BuildFailed, ManifestMismatch, MirrorError, ShardCorrupt
from eagle3_data.hub.digest import PIECE_BYTES, file_digest, file_xxh3
from eagle3_data.hub.mirror import Mirror, manifest_of
from eagle3_data.hub.notes import read_lines
from eagle3_data.manifest import FAILURES, MANIFEST, Manifest, ShardRow
from eagle3_data.runlock import RunLock, work_folder
from eagle3_data.shards.cache import CacheConfig, ShardCache
from eagle3_data.shards.layout import remote_path
from eagle3_data.status import format_bytes


@dataclass(slots=True)
class PullReport:
    folder: Path
    shards: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    """What came over the network this time."""
    there: int = 0
    """Shards that were here, checked before."""
    cached: int = 0
    """Shards that came from the shard cache."""


class Pull:
    """`run` once. `on_bytes(n)`: n more bytes are here."""

    def __init__(
        self,
        mirror: Mirror,
        folder: Path,
        *,
        workers: int = 4,
        piece_bytes: int = PIECE_BYTES,
        cache: CacheConfig | None = None,
        on_start: Callable[[Manifest], None] = lambda manifest: None,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.mirror, self.folder, self.workers, self.piece_bytes = mirror, folder, workers, piece_bytes
        self.on_start, self.on_bytes = on_start, on_bytes
        self.cache = ShardCache(cache) if cache else None
        self.report = PullReport(folder)
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self) -> PullReport:
        """Raises MirrorError, ManifestMismatch when other data lies in the folder, BuildFailed without space,
        ShardCorrupt when a shard of the mirror is not what its manifest says (twice)."""
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        with RunLock(self.folder, "pull.lock", "pull"):
            manifest = self._manifest()
            self._checked = self._read_notes()
            missing = [row for row in manifest.shards if not self._is_here(row)]
            self.report.shards, self.report.there = len(manifest.shards), len(manifest.shards) - len(missing)
            self._check_space(missing)
            self.on_start(manifest)
            self.on_bytes(manifest.nbytes - sum(row.nbytes for row in missing))
            self._fetch_all(missing)
            self._finish(manifest)
        return self.report

    def _manifest(self) -> Manifest:
        manifest = manifest_of(self.mirror)
        for row in manifest.shards:
            check_name(row.name, self.mirror.url)
        if (self.folder / MANIFEST).exists():
            here = Manifest.load(self.folder)
            known = {row.name: row.xxh3 for row in here.shards}
            if here.run != manifest.run or any(known.get(row.name, row.xxh3) != row.xxh3 for row in manifest.shards):
                raise ManifestMismatch(f"{self.folder} holds another build (run {here.run})", next="another folder")
        return manifest

    def _is_here(self, row: ShardRow) -> bool:
        """Whether the shard is here with the manifest's checksum; one that changed since its check is read again."""
        path = self.folder / "data" / row.name
        try:
            stat = path.stat()
        except FileNotFoundError:
            return False
        if stat.st_size != row.nbytes:
            return False
        if self._checked.get(row.name) == [row.xxh3, stat.st_mtime_ns]:
            return True
        if file_xxh3(path) != row.xxh3:
            return False
        self._note(row)
        return True

    def _check_space(self, missing: list[ShardRow]) -> None:
        need = sum(row.nbytes - self._begun(row) for row in missing)
        free = shutil.disk_usage(self.folder).free
        if need > free:
            raise BuildFailed(
                f"the shards need {format_bytes(need)} more and {self.folder} has {format_bytes(free)} free",
                next="another folder, or read the mirror directly: load_dataset(..., mirror=..., streaming=True)",
            )

    def _begun(self, row: ShardRow) -> int:
        part = self._part(row)
        return min(part.stat().st_size, row.nbytes) if part.exists() else 0

    def _part(self, row: ShardRow) -> Path:
        return self.folder / "data" / f".{row.name}.pull"

    def _fetch_all(self, missing: list[ShardRow]) -> None:
        threads = ThreadPoolExecutor(self.workers, thread_name_prefix="pull")
        try:
            work = [threads.submit(self._fetch, row) for row in missing]
            done, _ = wait(work, return_when=FIRST_EXCEPTION)
            self._stop.set()
            for future in done:
                future.result()
        finally:
            self._stop.set()
            threads.shutdown(wait=True, cancel_futures=True)

    def _fetch(self, row: ShardRow) -> None:
        for last in (False, True):
            problem = self._fetch_once(row, use_cache=not last)
            if not problem:
                return
            if last:
                raise ShardCorrupt(
                    f"{self.mirror.url}: {row.name} {problem}", next=f"eagle3-data verify {self.mirror.url}"
                )

    def _fetch_once(self, row: ShardRow, *, use_cache: bool) -> str:
        """What is wrong with the bytes that came; empty when the shard is in its place."""
        part, final = self._part(row), self.folder / "data" / row.name
        with open(part, "ab") as file:
            at = file.tell()
            if at > row.nbytes:
                file.truncate(0)
                at = 0
            self.on_bytes(at)
            copied = self._copy_cached(row, file) if use_cache else 0
            self.on_bytes(copied)
            at += copied
            while at < row.nbytes:
                if self._stop.is_set():
                    return ""
                end = min(at + self.piece_bytes, row.nbytes)
                data = self.mirror.read_range(remote_path(row.name), at, end)
                file.write(data)
                at = end
                with self._lock:
                    self.report.fetched_bytes += len(data)
                self.on_bytes(len(data))
            file.flush()
            os.fsync(file.fileno())
        found = file_digest(part)
        expected = (row.xxh3, row.sha256 or found.sha256)
        if (found.xxh3, found.sha256) != expected:
            part.unlink()
            self.on_bytes(-row.nbytes)
            return f"has checksum {found.xxh3}, the manifest says {row.xxh3}"
        os.replace(part, final)
        durable.fsync_dir(final.parent)
        self._note(row)
        with self._lock:
            self.report.cached += copied > 0
            self.report.fetched += copied == 0
        return ""

    def _copy_cached(self, row: ShardRow, file: BinaryIO) -> int:
        """The rest of the shard, where the cache has it; the number of bytes. Its checksum is compared like any."""
        found = self.cache.map(row) if self.cache else None
        if found is None:
            return 0
        begun = file.tell()
        for at in range(begun, row.nbytes, PIECE_BYTES):
            file.write(found[at : at + PIECE_BYTES])
        return row.nbytes - begun

    def _finish(self, manifest: Manifest) -> None:
        """Index, card and failures, then the manifest; a local one that lists more is kept."""
        whole = f"index/{manifest.split}.parquet"
        if (self.folder / MANIFEST).exists() and len(Manifest.load(self.folder).shards) > len(manifest.shards):
            return
        for path in (whole, CARD, FAILURES):
            content = self.mirror.read(path)
            if content is None:
                if path == whole:
                    raise MirrorError(f"{self.mirror.url} holds no {whole}")
                continue
            target = self.folder / path
            target.parent.mkdir(exist_ok=True)
            durable.hidden(target).write_bytes(content)
            durable.replace(target)
        manifest.save(self.folder)

    def _notes_path(self) -> Path:
        return work_folder(self.folder) / "pull.jsonl"

    def _read_notes(self) -> dict[str, list[object]]:
        path = self._notes_path()
        lines = read_lines(path) if path.exists() else ()
        return {str(line["name"]): [line["xxh3"], line["mtime_ns"]] for line in lines if line["event"] == "checked"}

    def _note(self, row: ShardRow) -> None:
        stat = (self.folder / "data" / row.name).stat()
        line = {"event": "checked", "name": row.name, "xxh3": row.xxh3, "mtime_ns": stat.st_mtime_ns}
        with self._lock, open(self._notes_path(), "a") as file:
            file.write("\n" + json.dumps(line) + "\n")


def check_name(name: str, where: str) -> None:
    """A manifest from a mirror must not name files outside `data/`. Raises ShardCorrupt."""
    stem, dot, kind = name.partition(".")
    if not (dot and kind == "tar" and stem.replace("-", "").replace("_", "").isalnum() and stem.isascii()):
        raise ShardCorrupt(f"{where} names a shard {name!r}, which is no shard's name", next="do not use this mirror")
