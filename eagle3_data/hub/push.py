"""Sealed shards to a mirror: hashed, sent by several threads, published in groups, and only then, if asked, removed.

A shard's way: sealed here -> hashed (is it still what was sealed?) -> sent (the mirror has the bytes, nobody sees them)
-> published (one commit with its card, index and manifest) -> confirmed (size and sha256, asked of the mirror) ->
deleted. A push that is killed anywhere goes on with the same command: the mirror is asked what it has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from eagle3_data import durable
from eagle3_data.card import CARD
from eagle3_data.errors import ConfigError, ShardCorrupt
from eagle3_data.hub.digest import file_digest, remote_digest
from eagle3_data.hub.mirror import Mirror, RemoteFile, Upload
from eagle3_data.hub.notes import PushNotes
from eagle3_data.hub.release import Published, publication, release
from eagle3_data.manifest import MANIFEST, Manifest, ShardRow
from eagle3_data.patience import Stopped
from eagle3_data.runlock import RunLock
from eagle3_data.shards.layout import remote_path

POLL_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PushConfig:
    workers: int = 4
    """Shards on their way at once."""
    commit_shards: int = 50
    """Shards per commit: a hub limits commits per hour, and its pages slow down with thousands of them."""
    commit_s: float = 600.0
    """A sent shard waits at most so long for its commit."""
    delete_local: bool = False
    """Remove a shard here once the mirror has confirmed its size and sha256."""
    license: str | None = None
    """For the card; None: what the published card says."""

    def __post_init__(self) -> None:
        if self.workers < 1 or self.commit_shards < 1 or self.commit_s < 0:
            raise ConfigError("workers and shards per commit must be at least 1, seconds not negative")


@dataclass(slots=True)
class PushReport:
    """`there`: shards that the mirror had before. sent + there == published when all is well."""

    target: str
    sent: int = 0
    sent_bytes: int = 0
    there: int = 0
    published: int = 0
    commits: int = 0
    deleted: int = 0
    of: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not self.problems and self.published == self.of


class Push:
    """One push of one folder to one mirror; `run` once."""

    def __init__(
        self,
        folder: Path,
        mirror: Mirror,
        config: PushConfig,
        *,
        where: str,
        on_text: Callable[[str], None] = lambda text: None,
        on_sent: Callable[[ShardRow], None] = lambda row: None,
        on_deleted: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.folder, self.mirror, self.config, self.where = folder, mirror, config, where
        self.on_text, self.on_sent, self.on_deleted = on_text, on_sent, on_deleted
        self.report = PushReport(mirror.url)
        self.stop = threading.Event()
        """Publish what is sent, then end."""
        self.hurry = threading.Event()
        """Publish now: somebody waits for space."""
        self._published: dict[str, str] = {}  # name -> sha256
        self._sent: dict[str, Upload] = {}
        self._sent_since = 0.0
        self._failed: set[str] = set()
        self._running: dict[Future[Upload], ShardRow] = {}
        self._before: Published | None = None

    def run(self, more: Callable[[], bool] = lambda: False) -> PushReport:
        """Push what is sealed; while `more()` says that the build goes on, what gets sealed later, too.

        Raises MirrorError when the mirror cannot be reached or refuses, ManifestMismatch when it holds other data. A
        shard that is damaged here is left out and reported.
        """
        with RunLock(self.folder, "push.lock", "push"):
            self._notes = PushNotes(self.folder, self.mirror.url)
            try:
                self._run(more)
            finally:
                self._notes.close()
        return self.report

    def _run(self, more: Callable[[], bool]) -> None:
        # not a context manager: its exit would wait for uploads that an error has made useless
        threads = ThreadPoolExecutor(self.config.workers, thread_name_prefix="push")
        try:
            while True:
                going_on = more()  # asked before the look, so that the last look sees the last shard
                manifest = self._look()
                if manifest is not None and not self.stop.is_set():
                    self._start(threads, manifest)
                self._collect(wait_s=POLL_S if self._running or going_on else 0.0)
                last = not self._running and (self.stop.is_set() or not going_on)
                if self._due(last):
                    self._publish()
                if last:
                    break
            self._last_word(manifest)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> Manifest | None:
        """The build's manifest now; None before there is one. The first time, also the mirror's."""
        if not (self.folder / MANIFEST).exists():
            return None
        manifest = Manifest.load(self.folder)
        self.report.of = len(manifest.shards)
        if self._before is None:
            self._before = Published.read(self.mirror)
            self._before.check(manifest, self.mirror.url)
            self._about = publication(self._before, self.where, self.config.license)
            self._recognise(manifest)
        return manifest

    def _recognise(self, manifest: Manifest) -> None:
        """What the mirror has already: listed by its manifest and there, with the size and sha256 that belong to it."""
        assert self._before is not None
        listing, digests = self.mirror.listing(), self._before.digests()
        for row in manifest.shards:
            found = listing.get(remote_path(row.name))
            digest = digests.get(row.name)
            if found is None or digest is None or found.nbytes != row.nbytes or found.sha256 not in (None, digest):
                continue
            self._published[row.name] = digest
        self.report.there = self.report.published = len(self._published)
        if self.config.delete_local:
            # a push that was killed between its commit and the deletion
            self._delete([name for name in self._published if (self.folder / "data" / name).exists()])

    def _start(self, threads: ThreadPoolExecutor, manifest: Manifest) -> None:
        busy = {row.name for row in self._running.values()}
        for row in manifest.shards:
            if row.name in self._published or row.name in self._sent or row.name in self._failed or row.name in busy:
                continue
            self._running[threads.submit(self._send, row)] = row

    def _send(self, row: ShardRow) -> Upload:
        """In a thread. Raises ShardCorrupt when the file is not what was sealed."""
        if self.stop.is_set():
            raise Stopped("stopped before it was sent")
        file = self.folder / "data" / row.name
        if not file.exists():
            raise ShardCorrupt(f"{row.name} is neither here nor in {self.mirror.url}")
        digest = self._notes.digest(file)
        if digest is None:
            digest = file_digest(file)
            self._notes.hashed(file, digest)
        if (digest.nbytes, digest.xxh3) != (row.nbytes, row.xxh3):
            raise ShardCorrupt(f"{row.name} is not what was sealed (checksum {digest.xxh3}, manifest {row.xxh3})")
        upload = Upload(remote_path(row.name), file, row.nbytes, digest.sha256)
        self.mirror.send(upload)
        self._notes.note("sent", row.name, row.nbytes)
        return upload

    def _collect(self, wait_s: float) -> None:
        if not self._running:
            if wait_s:
                self.stop.wait(wait_s)
            return
        done, _ = wait(self._running, timeout=wait_s, return_when=FIRST_COMPLETED)
        for future in done:
            row = self._running.pop(future)
            try:
                upload = future.result()
            except Stopped:
                continue
            except ShardCorrupt as error:
                self._failed.add(row.name)
                self.report.problems.append(error.message)
                continue
            if not self._sent:
                self._sent_since = time.monotonic()
            self._sent[row.name] = upload
            self.report.sent += 1
            self.report.sent_bytes += row.nbytes
            self.on_sent(row)

    def _due(self, last: bool) -> bool:
        if not self._sent:
            return False
        late = time.monotonic() - self._sent_since >= self.config.commit_s
        return last or late or len(self._sent) >= self.config.commit_shards or self.hurry.is_set()

    def _publish(self) -> None:
        """One commit: the sent shards and the files that describe them."""
        uploads = dict(sorted(self._sent.items()))
        digests = {**self._published, **{name: upload.sha256 for name, upload in uploads.items()}}
        small = release(self.folder, digests, self._about)
        count = len(uploads)
        message = f"{count} shards, {len(digests)} in all" if count else "Card, index and manifest"
        self.mirror.publish(list(uploads.values()), small, message)
        for name, upload in uploads.items():
            self._notes.note("published", name, upload.nbytes)
        self._published, self._sent = digests, {}
        self.hurry.clear()
        self.report.commits += 1
        self.report.published = len(digests)
        self.on_text(f"published {len(digests):,} of {self.report.of:,} shards")
        if self.config.delete_local:
            self._delete(list(uploads))

    def _last_word(self, manifest: Manifest | None) -> None:
        """The mirror's manifest says 'complete' too, once nothing is missing; no commit when nothing changed."""
        if manifest is None or not self._published or self._failed or self.stop.is_set():
            return
        small = release(self.folder, self._published, self._about)
        if any(small[path] != self.mirror.read(path) for path in (MANIFEST, CARD)):
            self._publish()

    def _delete(self, names: list[str]) -> None:
        """Only what the mirror confirms now, asked after the commit; anything else is kept and reported."""
        sizes = {row.name: row.nbytes for row in Manifest.load(self.folder).shards}
        found = self.mirror.look([remote_path(name) for name in names])
        for name in names:
            file = self.folder / "data" / name
            problem = self._unconfirmed(name, sizes[name], found.get(remote_path(name)))
            if problem:
                self.report.problems.append(f"{name}: {problem}; it is kept here")
                continue
            file.unlink(missing_ok=True)
            self._notes.note("deleted", name, sizes[name])
            self.report.deleted += 1
            self.on_deleted(name)
        if names:
            durable.fsync_dir(self.folder / "data")

    def _unconfirmed(self, name: str, nbytes: int, found: RemoteFile | None) -> str:
        """Why the mirror's copy is not proven to be the local file; empty when it is."""
        if found is None:
            return "the mirror does not have it"
        if found.nbytes != nbytes:
            return f"the mirror has {found.nbytes:,} bytes of {nbytes:,}"
        local = self._notes.digest(self.folder / "data" / name) or file_digest(self.folder / "data" / name)
        sha256 = (
            found.sha256 or remote_digest(self.mirror, found.path, nbytes).sha256
        )  # no word from the store: read it
        return "" if sha256 == local.sha256 else f"the mirror's sha256 is {sha256}, here it is {local.sha256}"
