"""How long to go on asking a mirror that refuses: as long as it says, else twice as long as before, up to a limit.

Everything that talks to a mirror waits by this: `call` for one request after another (push, pull, verify), `Tries` for
a transfer that goes on at the byte where it broke off.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from eagle3_data.errors import Eagle3Error, MirrorError
from eagle3_data.hub.redact import redact
from eagle3_data.shards.http import TRANSIENT, retry_after

T = TypeVar("T")
LASTING = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
"""Errors of an operating system or a store that the same call would meet again."""
TRANSPORT = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "aiohttp", "botocore")
"""Libraries whose errors without an answer mean that the connection failed."""


class Stopped(Eagle3Error):
    """The caller asked to stop while a mirror was being waited for."""

    reason = "stopped"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an error means: worth another try, and after how many seconds (None: as the back-off says)."""

    again: bool
    wait_s: float | None = None
    status: int | None = None


def judge(error: BaseException) -> Verdict:
    """Looks through the whole chain of causes: libraries wrap what the server said."""
    chain = list(_causes(error))
    for one in chain:
        response = getattr(one, "response", None)
        status = getattr(response, "status_code", None)
        if response is not None and isinstance(status, int):
            return Verdict(status in TRANSIENT, retry_after(response.headers), status)
    for one in chain:
        if isinstance(one, (Eagle3Error, *LASTING)):
            return Verdict(False)
        if isinstance(one, ConnectionError | TimeoutError) or type(one).__module__.split(".")[0] in TRANSPORT:
            return Verdict(True)
    return Verdict(isinstance(error, OSError))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__


@dataclass(frozen=True, slots=True)
class Patience:
    """Back-off doubles from `first_s` to `longest_s`, with jitter, so that many readers do not come back together."""

    first_s: float = 1.0
    longest_s: float = 120.0
    total_s: float = 3600.0
    """Without one success (or one byte) in so many seconds it is given up."""
    stop: threading.Event | None = None
    on_wait: Callable[[str], None] = lambda text: None
    """Gets a line before each wait of `call`."""
    secret: str | None = None
    """Never shown in a message."""

    def __repr__(self) -> str:
        return f"Patience(first_s={self.first_s}, longest_s={self.longest_s}, total_s={self.total_s})"

    def __reduce__(self) -> tuple[type[Patience], tuple[float, float, float]]:
        return Patience, (self.first_s, self.longest_s, self.total_s)  # events and callbacks stay in their process

    def call(self, what: str, work: Callable[[], T], *, also: tuple[int, ...] = ()) -> T:
        """`work()`. Raises MirrorError when it cannot succeed or did not in time, Stopped when `stop` is set.

        `also`: further HTTP status codes that are worth another try.
        """
        tries = Tries(self)
        while True:
            try:
                return work()
            except Eagle3Error:
                raise
            except Exception as error:
                verdict = judge(error)
                wait = tries.next_wait(verdict.wait_s) if verdict.again or verdict.status in also else None
                if wait is None:
                    raise self.failure(what, error, verdict) from None
                self.on_wait(f"{what}: {self.describe(error, verdict)}; again in {wait:.0f} s")
            self.wait(wait)

    def wait(self, seconds: float) -> None:
        if self.stop is None:
            time.sleep(seconds)
        elif self.stop.wait(seconds):
            raise Stopped("stopped while waiting for the mirror")

    def describe(self, error: BaseException, verdict: Verdict) -> str:
        """One line, without secrets."""
        text = redact(" ".join(str(error).split()), self.secret)[:300]
        return f"HTTP {verdict.status}: {text}" if verdict.status else f"{type(error).__name__}: {text}"

    def failure(self, what: str, error: BaseException, verdict: Verdict) -> MirrorError:
        hints = {
            401: "log in (hf auth login) or set HF_TOKEN",
            403: "your token needs write access to this repository",
            404: "check the name of the mirror and your access to it",
        }
        hint = hints.get(verdict.status or 0, "the same command goes on from here")
        return MirrorError(f"{what}: {self.describe(error, verdict)}", next=hint)


class Tries:
    """The tries of one request or transfer, since its last success."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.failures = 0
        self.progress()

    def progress(self) -> None:
        """Something came: the count and the clock start anew."""
        self.failures, self._pause = 0, self._patience.first_s
        self._deadline = time.monotonic() + self._patience.total_s

    def next_wait(self, told_s: float | None) -> float | None:
        """Seconds until the next try (`told_s`: what the other side asked for); None: give up."""
        self.failures += 1
        wait = self._pause * random.uniform(0.5, 1.0) if told_s is None else told_s
        self._pause = min(2 * self._pause, self._patience.longest_s)
        return None if time.monotonic() + wait > self._deadline else wait
