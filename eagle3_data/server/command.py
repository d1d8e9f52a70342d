"""What to start and how: the command line, the environment and the spool of one SGLang server."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from eagle3_data.errors import ConfigError
from eagle3_data.protocol import SPOOL_CONFIG, SPOOL_ENV, ProtocolError, SpoolConfig

Device = Literal["auto", "cpu", "cuda"]

NATIVE = (0, 5, 23)
"""First SGLang that captures by itself when told to; before it, the plugin hooks in."""
CAPTURING_REQUESTS = 128
"""At once in a capturing server: one that is told to speculate, as native capture is, takes 48 by itself. Not more
than fill a batch, since targets with linear attention (Qwen3-Next) reserve a state of tens of MB for each."""
DP_ATTENTION = ("--enable-dp-attention", "--attn-dp-size")
"""Either spelling gives data-parallel ranks attention of their own; the second is newer."""
CPU_RANKS_ENV = "SGLANG_CPU_OMP_THREADS_BIND"
PORTS = range(20_000, 32_000)
"""Below Linux's ephemeral ports, and with room for the ports that SGLang derives by adding to this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """What to start. Capture is on if and only if `spool` is given."""

    model: str
    """Hub id or folder."""
    spool: Path | None = None
    """Folder for dumps; made if missing. None: SGLang without capture."""
    layers: tuple[int, ...] | None = None
    """Aux layers as outputs, ascending; None: what the spool's settings say, else 1, n//2-1, n-4."""
    spool_config: SpoolConfig | None = None
    """Settings to write into the spool; None: those that lie there, else the defaults."""
    host: str = "127.0.0.1"
    port: int | None = None
    """None: a free one."""
    tp: int = 1
    device: Device = "auto"
    """'auto': a GPU when the driver shows one, else the CPU."""
    dtype: str = "auto"
    api_key: str | None = None
    draft: str | None = None
    """EAGLE3 draft to decode with (never together with `spool`)."""
    speculative_steps: int = 3
    """Draft tokens per step, in a chain."""
    extra_args: tuple[str, ...] = ()
    """More SGLang arguments; they come last, so they win."""
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    """Interpreter that has SGLang (and eagle3-data, for capture)."""

    def __post_init__(self) -> None:
        if self.draft is not None and self.spool is not None:
            raise ConfigError("a server with a draft cannot capture", next="leave out the draft or the spool")


def resolve_device(device: Device) -> Literal["cpu", "cuda"]:
    """'auto' becomes 'cuda' when an NVIDIA driver shows a GPU. Does not import torch."""
    if device != "auto":
        return device
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on right now, in the range whose neighbours SGLang can use, too."""
    for port in random.SystemRandom().sample(PORTS, 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise ConfigError(f"no free port on {host} between {PORTS.start} and {PORTS.stop - 1}", next="name one with --port")


def server_command(config: ServerConfig, *, port: int, native: bool) -> list[str]:
    """The command line of `config`; `native`: SGLang is at least `NATIVE`."""
    cpu = resolve_device(config.device) == "cpu"
    command = [
        *(config.python, "-m", "sglang.launch_server"),
        *("--model-path", config.model, "--host", config.host, "--port", str(port)),
        *("--dtype", config.dtype, "--tp-size", str(config.tp)),
    ]
    if cpu:
        command += ["--device", "cpu", "--attention-backend", "torch_native"]
        # SGLang replaces `--attention-backend intel_amx` on processors without AMX, but not the two halves of it.
        # Decoding: torch_native loops over requests. Prefill: torch_native equals transformers bit for bit, and only
        # the other can verify a draft, or fill a rank's batch up to the longest of all data-parallel ranks.
        command += ["--decode-attention-backend", "intel_amx"]
        if config.draft or any(arg.partition("=")[0] in DP_ATTENTION for arg in config.extra_args):
            command += ["--prefill-attention-backend", "intel_amx"]
        command += ["--max-total-tokens", "16384", "--mem-fraction-static", "0.3"]
        command += ["--chunked-prefill-size", "-1", "--sleep-on-idle"]
    if config.api_key:
        command += ["--api-key", config.api_key]
    if config.spool is not None:
        command += ["--disable-radix-cache", "--disable-cuda-graph"]
        if native:
            command += ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"]
            command += ["--max-running-requests", str(CAPTURING_REQUESTS)]
        elif config.tp > 1:  # else some models' outputs would be captured as one rank's share of them
            command += ["--enforce-disable-flashinfer-allreduce-fusion"]
    if config.draft:
        command += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", config.draft]
        command += ["--speculative-num-steps", str(config.speculative_steps), "--speculative-eagle-topk", "1"]
        command += ["--speculative-num-draft-tokens", str(config.speculative_steps + 1)]
    return [*command, *config.extra_args]


def server_environment(config: ServerConfig) -> dict[str, str]:
    """The child's whole environment."""
    env = dict(os.environ)
    env.pop(SPOOL_ENV, None)
    env["PYTHONSAFEPATH"] = "1"  # a folder `eagle3_data` or `sglang` where the user happens to be must not win
    path = []
    if resolve_device(config.device) == "cpu":
        from eagle3_data.patches.sglang_cpu import ENVIRONMENT, STUBS

        env.update(ENVIRONMENT)
        path.append(str(STUBS))
        if config.tp > 1:  # SGLang gives each rank a NUMA node of its own, and refuses more ranks than nodes
            env.setdefault(CPU_RANKS_ENV, cpus_by_rank(config.tp))
    if Path(config.model).is_dir():
        env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    if config.spool is not None:
        env[SPOOL_ENV] = str(config.spool.resolve())
        plugins = env.get("SGLANG_PLUGINS", "")
        if plugins and "eagle3_data" not in plugins.split(","):
            env["SGLANG_PLUGINS"] = f"{plugins},eagle3_data"
    env.update(config.env)
    path += [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if path:
        env["PYTHONPATH"] = os.pathsep.join(path)
    return env


def cpus_by_rank(ranks: int) -> str:
    """This process's CPUs dealt to the ranks, as `CPU_RANKS_ENV` has them (0,2|1,3); fewer are shared."""
    cpus = sorted(os.sched_getaffinity(0))
    return "|".join(",".join(map(str, cpus[rank::ranks] or [cpus[rank % len(cpus)]])) for rank in range(ranks))


def inspect_sglang(config: ServerConfig, env: Mapping[str, str]) -> tuple[int, ...]:
    """Version of the interpreter's SGLang. Raises ConfigError when SGLang, or our plugin beside it, is missing."""
    code = (
        "from importlib.metadata import version\n"
        "print(version('sglang'))\n"
        "try: from eagle3_data.patches.sglang import register\n"
        "except ImportError as error: print(error)\n"
    )
    try:
        found = subprocess.run([config.python, "-c", code], env=dict(env), capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise ConfigError(
            f"{config.python} cannot be run: {error.strerror}", next="--python: an interpreter"
        ) from error
    if found.returncode:
        raise ConfigError(
            f"{config.python} has no SGLang",
            next="install it there (pip install sglang), or name another interpreter with --python",
        )
    version, *problem = found.stdout.splitlines()
    if config.spool is not None and problem:
        raise ConfigError(
            f"{config.python} has SGLang {version} and not our plugin: {problem[0]}",
            next="pip install eagle3-data beside SGLang",
        )
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def prepare_spool(spool: Path, config: ServerConfig) -> None:
    """Make the folder, and write `eagle3.json` into it where the caller asked for settings. Raises ConfigError."""
    try:
        spool.mkdir(parents=True, exist_ok=True)
        settings = config.spool_config or SpoolConfig.load(spool)
        if config.layers is not None:
            settings = replace(settings, layers=config.layers)
        if config.spool_config is not None or config.layers is not None:
            settings.save(spool)
    except OSError as error:
        raise ConfigError(
            f"spool {spool}: {error.strerror}", next="--spool: a folder on a large tmpfs or NVMe"
        ) from error
    except ProtocolError as error:
        raise ConfigError(str(error), next=f"correct or remove {spool / SPOOL_CONFIG}") from error
