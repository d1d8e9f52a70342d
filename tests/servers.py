"""The real SGLang server for tests, on a CPU: started when first asked for, one kind at a time.

A start takes 20 to 60 seconds. So tests name the kind of server they need by a fixture (`llama_server` and so on), are
ordered by kind (tests/conftest.py), and each kind is started once a session. Under pytest-xdist they all carry one
group: run with `--dist loadgroup`, and one worker has the servers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import shutil
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from safetensors import safe_open
from safetensors.torch import load_file

from eagle3_data.protocol import DUMP_SUFFIX, DumpMeta, SpoolConfig
from eagle3_data.server.client import ServerClient
from eagle3_data.server.process import ServerConfig, ServerProcess
from tests.models import VOCAB, tiny_model

T = TypeVar("T")

SPOOL = SpoolConfig(high_water_bytes=256 << 20, pinned_bytes=512 << 20, writers=2, temp_age_s=60.0)


@dataclasses.dataclass(frozen=True)
class Kind:
    """`model`: of tests/models.py; `arguments`: of SGLang, besides ours."""

    model: str
    arguments: tuple[str, ...] = ()
    api_key: str | None = None
    tp: int = 1


KINDS = {
    "dp": Kind("qwen3", ("--dp-size", "2", "--enable-dp-attention"), tp=2),
    "tp": Kind("llama", ("--chunked-prefill-size", "64"), tp=2),
    "llama": Kind("llama"),
    "chunked": Kind("llama", ("--chunked-prefill-size", "64"), "tests-key"),
    "qwen3": Kind("qwen3"),
}
"""In the order in which tests run: the last one stays to the end, and idle servers of two ranks do not sleep."""


@dataclasses.dataclass
class RunningServer:
    """A patched server, its spool and its model."""

    kind: str
    url: str
    spool: Path
    model: Path
    process: ServerProcess
    api_key: str | None = None

    def client(self) -> ServerClient:
        return ServerClient(self.url, api_key=self.api_key)

    def files(self) -> list[str]:
        """Names in the spool apart from its settings and the server's own mark."""
        names = (path.name for path in self.spool.iterdir())
        return sorted(name for name in names if name != "eagle3.json" and not name.startswith(".server-"))


class ServerPark:
    """Starts servers when they are asked for; starting one kind ends the one before."""

    def __init__(self) -> None:
        self._running: RunningServer | None = None

    def get(self, kind: str) -> RunningServer:
        if self._running is None or self._running.kind != kind or not self._running.process.alive:
            self.close()
            self._running = _start(kind)
        return self._running

    def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.process.stop()
            shutil.rmtree(running.spool, ignore_errors=True)


def capture_config(model: Path, spool: Path, *extra: str, **changes: Any) -> ServerConfig:
    """A small CPU server that captures `model` into `spool`."""
    config = ServerConfig(
        model=str(model),
        spool=spool,
        spool_config=SPOOL,
        device="cpu",
        dtype="float32",
        extra_args=extra,
        env={"OMP_NUM_THREADS": str(max(1, 2 // changes.get("tp", 1)))},
    )
    return dataclasses.replace(config, **changes)


def new_spool() -> Path:
    """A fresh spool folder, in memory where there is such a file system."""
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="eagle3-test-spool-", dir=shm if shm.is_dir() else None))


def _start(kind: str) -> RunningServer:
    wanted = KINDS[kind]
    model, spool = tiny_model(wanted.model), new_spool()
    config = capture_config(model, spool, *wanted.arguments, api_key=wanted.api_key, tp=wanted.tp)
    process = ServerProcess(config, start_timeout_s=400)
    try:
        process.start()
    except BaseException:
        shutil.rmtree(spool, ignore_errors=True)
        raise
    return RunningServer(kind, process.url, spool, model, process, wanted.api_key)


def prompt(tokens: int, seed: int) -> list[int]:
    """Random ids, none of them special."""
    source = random.Random(f"{tokens}/{seed}")
    return [source.randrange(8, VOCAB) for _ in range(tokens)]


def read_dump(path: Path) -> tuple[DumpMeta, dict[str, Any]]:
    """Metadata and tensors."""
    with safe_open(path, "pt") as file:
        meta = DumpMeta.from_strings(file.metadata())
    return meta, load_file(path)


async def captured(server: RunningServer, rid: str, timeout_s: float = 30.0) -> tuple[DumpMeta, dict[str, Any]]:
    """Wait for a dump in the server's spool, read it and remove it."""
    path = server.spool / f"{rid}{DUMP_SUFFIX}"
    async with asyncio.timeout(timeout_s):
        while not path.exists():
            await asyncio.sleep(0.01)
    found = read_dump(path)
    path.unlink()
    return found


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def rids(run_id: str, prompts: Sequence[object]) -> list[str]:
    return [f"e3d-{run_id}-{i:04d}-0" for i in range(len(prompts))]
