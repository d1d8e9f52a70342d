"""An SGLang server as a child process: started with the right flags, watched, and never left behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from eagle3_data.errors import ConfigError, RequestTimeout, ServerError
from eagle3_data.protocol import SPOOL_CONFIG, SPOOL_ENV, ProtocolError, SpoolConfig

Device = Literal["auto", "cpu", "cuda"]

REFUSAL = "eagle3-data refuses to capture: "
"""How the plugin's refusals begin in the server's log."""
NATIVE = (0, 5, 23)
"""First SGLang that captures by itself when told to; before it, the plugin hooks in."""
PORTS = range(20_000, 32_000)
"""Below Linux's ephemeral ports, and with room for the ports that SGLang derives by adding to this one."""
POLL_S = 0.5
LOG_LINES = 25
"""Lines of the log that an error shows when the plugin has not said what is wrong."""


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
        # Speculative decoding on a CPU exists in one backend only.
        backend = "intel_amx" if config.draft else "torch_native"
        command += ["--device", "cpu", "--attention-backend", backend]
        command += ["--max-total-tokens", "16384", "--mem-fraction-static", "0.3"]
        command += ["--chunked-prefill-size", "-1", "--sleep-on-idle"]
    if config.api_key:
        command += ["--api-key", config.api_key]
    if config.spool is not None:
        command += ["--disable-radix-cache", "--disable-cuda-graph"]
        if native:
            command += ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"]
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


class ServerProcess:
    """A running SGLang server. Use as a context manager; leaving it ends the server and everything it started.

    The server also ends when this process dies in any way, `kill -9` included: see `lifeline`.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        log: Path | None = None,
        start_timeout_s: float = 1800.0,
        on_progress: Callable[[float, str], None] | None = None,
    ) -> None:
        """`log`: file that the server's output is appended to; None: a temporary one, removed after a clean end.

        `on_progress(seconds, last log line)` is called about twice a second until the server is healthy.
        """
        self.config = config
        self.port = config.port or free_port(config.host)
        self._start_timeout_s, self._on_progress = start_timeout_s, on_progress
        self._log_is_ours = log is None
        self.log = log or Path(tempfile.mkstemp(prefix="eagle3-sglang-", suffix=".log")[1])
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = -1

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.config.host in ("0.0.0.0", "") else self.config.host
        return f"http://{host}:{self.port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(keep_log=error is not None)

    def start(self) -> None:
        """Start and wait until the server is healthy. Raises ServerError, with the reason, when it ends before."""
        env = server_environment(self.config)
        native = inspect_sglang(self.config, env) >= NATIVE
        if self.config.spool is not None:
            prepare_spool(self.config.spool, self.config)
        command = server_command(self.config, port=self.port, native=native)
        watched, self._lifeline = os.pipe()
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("lifeline.py")), str(watched), *command],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(watched,),
                    start_new_session=True,  # one group to end; Ctrl-C in our terminal is ours to handle
                )
        finally:
            os.close(watched)
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop(keep_log=True)
            raise

    def stop(self, *, grace_s: float = 10.0, keep_log: bool = False) -> None:
        """End the server and every process it started. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._log_is_ours and not keep_log:
            self.log.unlink(missing_ok=True)

    def check_alive(self) -> None:
        """Raise ServerError, with what the log says, when the server has ended."""
        if not self.alive:
            code = self._process.returncode if self._process is not None else "none"
            raise ServerError(f"SGLang ended with exit code {code}\n{self.explanation()}", next=f"read {self.log}")

    def explanation(self) -> str:
        """Why the server ended: the plugin's refusals if there are any, else the end of the log."""
        with self.log.open(errors="replace") as file:
            file.seek(self._log_start)
            lines = file.read().splitlines()
        refusals = [REFUSAL + line.split(REFUSAL, 1)[1] for line in lines if REFUSAL in line]
        return "\n".join(dict.fromkeys(refusals) if refusals else lines[-LOG_LINES:])

    def _wait_until_healthy(self) -> None:
        began = time.monotonic()
        while not _healthy(self.url):
            self.check_alive()
            waited = time.monotonic() - began
            if waited > self._start_timeout_s:
                raise RequestTimeout(
                    f"SGLang was not healthy after {waited:.0f} s\n{self.explanation()}", next=f"read {self.log}"
                )
            if self._on_progress is not None:
                self._on_progress(waited, last_line(self.log))
            time.sleep(POLL_S)
        self.check_alive()  # a foreign server on the same port would be healthy, too


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


def last_line(log: Path) -> str:
    """The last line of a growing file, without reading the rest of it."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
    return ""


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):  # HTTPError, URLError, resets, timeouts
        return False


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
