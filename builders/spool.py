"""Where dumps arrive: the server's spool folder when we share it, its dump endpoint when we do not."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from eagle3_data.errors import DumpFailed, DumpMissing, SpoolFull
from eagle3_data.protocol import DUMP_SUFFIX, ERROR_SUFFIX, DumpError, RequestId
from eagle3_data.server.client import ServerClient

POLL_S = 0.003
FREE_S = 0.2
FULL = ("disk", "pinned_full")
"""Reasons of error records that pass when the spool is emptied."""
STALE_S = 3600.0
"""A dump of ours that nobody took for this long is removed; a live builder takes its dumps within seconds."""
Keep = Callable[[str], bool]
"""Whether somebody still waits for the dump of this request id."""


class Spool(Protocol):
    """One server's dumps, by request id."""

    async def wait(self, rid: str, deadline_s: float) -> Path:
        """Path of the whole dump. Raises DumpFailed (the server left an error record), DumpMissing (too late)."""

    async def remove(self, rid: str) -> None:
        """Drop the dump or error record of `rid`; no error when there is none."""

    def free_bytes(self) -> int | None:
        """Space left for dumps, believed for FREE_S; None when this machine cannot tell."""

    def leftovers(self, run: str) -> dict[str, Path]:
        """Dumps of an earlier process of this run that lie here now, by request id."""

    def sweep(self, run: str, keep: Keep) -> int:
        """Remove what nobody will take: files of `run` that `keep` does not name, others STALE_S old; how many.

        `keep` is asked after the folder was listed: a dump appears after its request id is known, so a listed one that
        is not kept then is nobody's.
        """


class LocalSpool:
    """A folder shared with the server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._free, self._looked = 0, -FREE_S

    def free_bytes(self) -> int | None:
        now = time.monotonic()
        if now - self._looked > FREE_S:
            self._free, self._looked = shutil.disk_usage(self.folder).free, now
        return self._free

    async def wait(self, rid: str, deadline_s: float) -> Path:
        path, error = self.folder / f"{rid}{DUMP_SUFFIX}", self.folder / f"{rid}{ERROR_SUFFIX}"
        end, pause = time.monotonic() + deadline_s, POLL_S
        while True:
            if path.exists():
                return path
            if error.exists():
                record = DumpError.from_json(error.read_text())
                kind = SpoolFull if record.reason in FULL else DumpFailed
                raise kind(f"server could not dump {rid}: {record.reason}: {record.detail}")
            if time.monotonic() >= end:
                raise DumpMissing(f"no dump of {rid} {deadline_s:.0f} s after its response")
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.1)

    async def remove(self, rid: str) -> None:
        await asyncio.to_thread(self._unlink, rid)  # freeing the pages of a large dump takes tens of milliseconds

    def _unlink(self, rid: str) -> None:
        for suffix in (DUMP_SUFFIX, ERROR_SUFFIX):
            (self.folder / f"{rid}{suffix}").unlink(missing_ok=True)

    def leftovers(self, run: str) -> dict[str, Path]:
        found = {}
        for path in self.folder.glob(f"e3d-{run}-*{DUMP_SUFFIX}"):
            rid = path.name.removesuffix(DUMP_SUFFIX)
            if RequestId.parse(rid):
                found[rid] = path
        return found

    def sweep(self, run: str, keep: Keep) -> int:
        removed, oldest = 0, time.time() - STALE_S
        for path in list(self.folder.glob("e3d-*")):
            rid = RequestId.parse(path.name.removesuffix(DUMP_SUFFIX).removesuffix(ERROR_SUFFIX))
            if rid is None or keep(str(rid)):
                continue
            try:
                # late dumps of a killed builder would fill the spool if they waited to grow old
                if rid.run == run or path.stat().st_mtime < oldest:
                    path.unlink()
                    removed += 1
            except FileNotFoundError:
                continue
        return removed


class RemoteSpool:
    """The dump endpoint of a server on another machine; dumps pass through `scratch` on ours."""

    def __init__(self, client: ServerClient, scratch: Path) -> None:
        self.client, self.scratch = client, scratch
        scratch.mkdir(parents=True, exist_ok=True)

    async def wait(self, rid: str, deadline_s: float) -> Path:
        path = self.scratch / f"{rid}{DUMP_SUFFIX}"
        await self.client.fetch_dump(rid, path, wait_s=deadline_s)
        return path

    async def remove(self, rid: str) -> None:
        (self.scratch / f"{rid}{DUMP_SUFFIX}").unlink(missing_ok=True)
        await self.client.delete_dump(rid)

    def free_bytes(self) -> int | None:
        return None  # the server leaves an error record instead: SpoolFull, and the sample waits

    def leftovers(self, run: str) -> dict[str, Path]:
        return {}

    def sweep(self, run: str, keep: Keep) -> int:
        for path in list(self.scratch.glob("e3d-*")):
            if not keep(path.name.removesuffix(DUMP_SUFFIX)):
                path.unlink(missing_ok=True)
        return 0
