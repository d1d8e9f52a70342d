"""`--max-inflight auto`: how many requests in flight a server is worth, found while it works.

More requests raise the throughput up to a knee; beyond it they only wait in the server and fill the spool. The limit is
doubled while that pays, and taken back to the last step that paid. Servers change (other clients, longer prompts), so
the next step is tried again from time to time.
"""

from __future__ import annotations

START = 4
MOST = 1024
PAYS = 1.10
"""A doubled limit must raise tokens per second by this factor to be kept."""
AGAIN = 32
"""Windows after which the next step is tried again."""


class Knee:
    """The limit of one server. Pure: `done` is told the time."""

    def __init__(self, start: int = START, most: int = MOST) -> None:
        self.limit, self.most = start, most
        self._began: float | None = None
        self._requests = self._tokens = 0
        self._paid: tuple[int, float] | None = None
        """The last limit that paid, and its tokens per second."""
        self._held = 0

    @property
    def found(self) -> bool:
        """Whether the limit rests on its knee."""
        return self._held > 0

    def done(self, tokens: int, now: float) -> None:
        """One request of `tokens` ended at `now` (seconds). A window is as many ends as fill the limit twice."""
        if self._began is None:
            self._began = now  # the first end only starts the clock: what was before was the server warming up
            return
        self._requests += 1
        self._tokens += tokens
        if self._requests < 2 * self.limit or now <= self._began:
            return
        rate = self._tokens / (now - self._began)
        self._move(rate)
        self._began, self._requests, self._tokens = None, 0, 0

    def _move(self, rate: float) -> None:
        if self._held:
            self._held = (self._held + 1) % (AGAIN + 1)
            if self._held == 0:  # look once more whether the next step pays now
                self._paid = (self.limit, rate)
                self.limit = min(2 * self.limit, self.most)
            return
        if self._paid is None or rate >= PAYS * self._paid[1]:
            self._paid = (self.limit, rate)
            if self.limit < self.most:
                self.limit = min(2 * self.limit, self.most)
            else:
                self._held = 1
            return
        self.limit, self._held = self._paid[0], 1
