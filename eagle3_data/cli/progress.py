"""What a person sees while something long runs: a live bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from eagle3_data.journal import Tick
from eagle3_data.status import Status, format_line, summarise

LINE_S = 30.0
"""Without a terminal: one line per this many seconds, and one at the end."""

console = Console(stderr=True)
"""What happens meanwhile; the answer of a command goes to `answer`, so that it can be piped."""
answer = Console()


def say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


class RunProgress:
    """Shows the ticks of a build. Use as a context manager."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._ticks: list[Tick] = []
        self._last_line = 0.0
        self._task: TaskID | None = None
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[line]}"), console=console
        )

    def __enter__(self) -> RunProgress:
        if console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if console.is_terminal:
            self._bar.stop()

    def __call__(self, tick: Tick) -> None:
        self._ticks = [*self._ticks[-99:], tick]
        status = summarise(self._ticks, time.time(), alive=True)
        if console.is_terminal:
            self._show(status)
        elif tick.event == "end" or time.monotonic() - self._last_line >= LINE_S:
            self._last_line = time.monotonic()
            print(format_line(status), file=sys.stderr, flush=True)

    def _show(self, status: Status) -> None:
        line = format_line(status)
        if self._task is None:
            self._task = self._bar.add_task(self.what, total=status.of, line=line)
        self._bar.update(self._task, total=status.of, completed=status.done, line=line)
