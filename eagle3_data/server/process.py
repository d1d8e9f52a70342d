"""An SGLang server as a child process: started, watched, and never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from eagle3_data.errors import RequestTimeout, ServerError
from eagle3_data.server.command import (
    NATIVE,
    Device,
    ServerConfig,
    free_port,
    inspect_sglang,
    prepare_spool,
    resolve_device,
    server_command,
    server_environment,
)

__all__ = ["Device", "ServerConfig", "ServerProcess", "free_port", "resolve_device"]

REFUSAL = "eagle3-data refuses to capture: "
"""How the plugin's refusals begin in the server's log."""
POLL_S = 0.5
GRACE_S = 10.0
"""For a capturing server to write what it has captured."""
GONE_S, GONE_POLL_S = 60.0, 0.05
"""How long killed processes are waited for, and how often looked for."""
LOG_LINES = 25
"""Lines of the log that an error shows when the plugin has not said what is wrong."""


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

    def stop(self, *, keep_log: bool = False) -> None:
        """End the server and every process it started; one that captures may finish its dumps. Safe to call twice.

        Returns when they are gone, with their memory and ports: the next server may want both.
        """
        process, self._process = self._process, None
        if process is not None:
            # SGLang takes five seconds to end by itself, and without capture has nothing to finish
            if self.config.spool is not None:
                _signal_group(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            _wait_for_group(process.pid)
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


def _wait_for_group(group: int) -> None:
    """SIGKILL only begins an end: a process with a GPU or pinned memory takes seconds to give them back."""
    end = time.monotonic() + GONE_S
    while time.monotonic() < end and any(_is_alive(stat, group) for stat in Path("/proc").glob("[0-9]*/stat")):
        time.sleep(GONE_POLL_S)


def _is_alive(stat: Path, group: int) -> bool:
    """Whether a process of `group` still holds anything; a zombie, which waits for its parent alone, does not."""
    try:
        state, _, of, *_ = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(of) == group and state != "Z"


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
