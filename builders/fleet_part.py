"""One part of a build in parts, where it runs: what its worker is told, does, and answers. JSON both ways."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from eagle3_data import __version__
from eagle3_data.builders.build import build
from eagle3_data.builders.settings import BuildReport
from eagle3_data.builders.stored import recall
from eagle3_data.errors import ConfigError, Eagle3Error
from eagle3_data.runlock import is_held

LOCK_WAIT_S = 120.0
"""How long a part's new worker waits for the lock of the one before: a shared file system may free it late."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartJob:
    """What a worker is told; everything else lies in the part's folder."""

    index: int
    folder: str
    servers: tuple[str, ...]
    api_key: str | None
    retry_failed: bool
    cwd: str
    version: str = __version__

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PartJob:
        data = json.loads(text)
        return cls(**{**data, "servers": tuple(data["servers"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a part's worker ended: a report, or what stopped it."""

    report: BuildReport | None = None
    error: str = ""
    next: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        data = json.loads(text)
        if data["report"] is not None:
            data["report"] = BuildReport(**{**data["report"], "out": Path(data["report"]["out"])})
        return cls(**data)


def work_part(job: PartJob) -> Outcome:
    """In a worker: the build of one part. Errors of ours are an outcome, so that nothing has to be unpickled."""
    host, folder = socket.gethostname(), Path(job.folder)
    try:
        if job.version != __version__:
            raise ConfigError(
                f"{host} has eagle3-data {__version__}, the driver {job.version}", next="install one version everywhere"
            )
        if not folder.is_dir():
            raise ConfigError(
                f"{host} does not see {folder}", next="--out on a file system that every worker mounts at one path"
            )
        if Path(job.cwd).is_dir():
            os.chdir(job.cwd)  # so that relative names of inputs and model mean what they mean to the driver
        end = time.monotonic() + LOCK_WAIT_S
        while is_held(folder) and time.monotonic() < end:
            time.sleep(0.2)
        config = replace(recall(folder), servers=job.servers, api_key=job.api_key, retry_failed=job.retry_failed)
        return Outcome(report=build(config, on_tick=lambda tick: None, on_text=lambda text: None))
    except Eagle3Error as error:
        return Outcome(error=error.message, next=error.next)
