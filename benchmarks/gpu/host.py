"""What all GPU benchmarks share: the servers they start, what the machine says of itself, and the results file.

On a machine without a GPU (`--device cpu`, with a tiny model) every script runs the same way: so they are tried before
they cost device time. A result says on which device it was taken; `tables.py` prints none that was not on a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import eagle3_data
from eagle3_data.protocol import SpoolConfig
from eagle3_data.server.command import Device, ServerConfig, resolve_device
from eagle3_data.server.process import ServerProcess

GIB = 1 << 30
NO_GRAPHS = ("--disable-cuda-graph",)
DECODE_GRAPHS = ("--cuda-graph-config", '{"decode": {"backend": "full"}, "prefill": {"backend": "disabled"}}')
"""Wins over `--disable-cuda-graph`; prefill graphs cannot be captured through on this path."""
PACKAGES = ("sglang", "torch", "transformers", "triton", "eagle3-data")


@dataclass(frozen=True, kw_only=True)
class Host:
    """How servers are started here."""

    device: Device = "auto"
    chunk_tokens: int = 8192
    memory_share: float = 0.6
    log_folder: Path = Path("/tmp")

    @property
    def cpu(self) -> bool:
        return resolve_device(self.device) == "cpu"

    def flags(self) -> tuple[str, ...]:
        """Equal for plain and capturing servers, so that capture is the only difference."""
        shared = ("--disable-radix-cache", "--chunked-prefill-size", str(self.chunk_tokens))
        if self.cpu:
            return shared
        share = ("--mem-fraction-static", str(self.memory_share))
        return (*shared, "--attention-backend", "triton", "--sampling-backend", "pytorch", *share)

    def config(
        self, model: Path, *, spool: Path | None, more: tuple[str, ...] = NO_GRAPHS, **named: Any
    ) -> ServerConfig:
        settings = SpoolConfig(high_water_bytes=16 * GIB, pinned_bytes=8 * GIB)
        if self.cpu:
            settings = SpoolConfig(high_water_bytes=GIB // 4, pinned_bytes=GIB // 4, writers=2)
        dtype = named.pop("dtype", "float32" if self.cpu else "bfloat16")
        return ServerConfig(
            model=str(model),
            spool=spool,
            spool_config=settings if spool is not None else None,
            device=self.device,
            dtype=dtype,
            extra_args=(*self.flags(), *more),
            **named,
        )

    @contextlib.contextmanager
    def serving(
        self, config: ServerConfig, name: str, *, env: Mapping[str, str] | None = None
    ) -> Iterator[ServerProcess]:
        began = time.monotonic()
        if env:
            config = replace(config, env={**config.env, **env})
        with ServerProcess(config, log=self.log_folder / f"{name}.log", start_timeout_s=420) as server:
            print(f"{name}: up after {time.monotonic() - began:.0f} s", flush=True)
            yield server


@contextlib.contextmanager
def together(*servers: contextlib.AbstractContextManager[ServerProcess]) -> Iterator[list[ServerProcess]]:
    """Servers that are started all at once: a start takes a minute or two."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        yield list(pool.map(stack.enter_context, servers))


def dummy(*more: str) -> tuple[str, ...]:
    """Flags of a server with made-up weights: only config.json and a tokenizer are read."""
    return ("--load-format", "dummy", *more)


def server_memory_mib(server: ServerProcess) -> int | None:
    """GPU memory of a server's processes, MiB; None without a GPU."""
    return group_memory_mib(server._process.pid if server._process is not None else -1)


def group_memory_mib(group: int) -> int | None:
    """GPU memory of a process group, MiB, as the driver says; None without a GPU."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    total = 0
    for line in lines:
        pid, used = (part.strip() for part in line.split(","))
        with contextlib.suppress(ProcessLookupError, ValueError):
            total += int(used) if os.getpgid(int(pid)) == group else 0
    return total


def steady_rate(run: Path) -> float:
    """Tokens/s of a training run: the median of the second half of its log lines."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [line["train/tokens_per_s"] for line in lines if "train/tokens_per_s" in line]
    return float(statistics.median_high(rates[len(rates) // 2 :])) if rates else 0.0


def versions() -> dict[str, str]:
    """What ran: packages, Python, the GPU and its driver, and a digest of this package's source."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "cores": str(os.cpu_count())}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    source = hashlib.sha256()
    for path in sorted(Path(eagle3_data.__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    found["source"] = source.hexdigest()[:12]
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
        found["gpu"] = f"{len(gpus)} x {gpus[0]}" if gpus else "none"
    return found


@dataclass
class Results:
    """One benchmark's results; saved after every measurement, so that a run that is cut off keeps what it had."""

    path: Path
    benchmark: str
    settings: dict[str, Any]
    device: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        print("  ".join(f"{name}={_short(value)}" for name, value in row.items()), flush=True)
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        body = {
            "benchmark": self.benchmark,
            "device": self.device,
            "settings": self.settings,
            "versions": versions(),
            "rows": self.rows,
        }
        hidden = self.path.with_name(f".{self.path.name}")
        hidden.write_text(json.dumps(body, indent=1, default=str) + "\n")
        hidden.rename(self.path)


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
