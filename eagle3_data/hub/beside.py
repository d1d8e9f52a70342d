"""Pushing while a build goes on: a thread that follows the build's manifest, and the build's bound on local shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from eagle3_data.errors import Eagle3Error
from eagle3_data.hub.mirror import Mirror, make_mirror, parse_repository
from eagle3_data.hub.push import Push, PushConfig, PushReport
from eagle3_data.hub.redact import redact
from eagle3_data.hub.scratch import Scratch
from eagle3_data.patience import Patience


def where_of(target: str) -> str:
    """How the card names the mirror: `org/name`, or the URL without secrets."""
    found = parse_repository(target)
    return found[0] if found else redact(target.rstrip("/"))


class PushBeside:
    """Context manager around a build. Entering it opens the mirror: a wrong name or token stops the build early.

    Leaving it waits until everything sealed is published; after an error or an interruption, only for what is on its
    way. `report` and `error` tell how it ended: the mirror's troubles never fail a build.
    """

    def __init__(
        self,
        folder: Path,
        target: str,
        config: PushConfig,
        *,
        scratch_bytes: int | None = None,
        on_text: Callable[[str], None],
    ) -> None:
        self.error: Eagle3Error | None = None
        self._built = threading.Event()
        self._mirror: Mirror = make_mirror(target, Patience(on_wait=on_text))
        self.scratch: Scratch | None = None
        self._push = Push(
            folder,
            self._mirror,
            config,
            where=where_of(target),
            on_text=lambda text: on_text(f"mirror: {text}"),
            on_deleted=self._deleted,
        )
        if scratch_bytes is not None:
            self.scratch = Scratch(folder, scratch_bytes, self._push.hurry.set)
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    @property
    def report(self) -> PushReport:
        return self._push.report

    def __enter__(self) -> PushBeside:
        self._mirror.open(create=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self._push.stop.set()
        self._built.set()
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self._push.stop.set()
            raise
        finally:
            self._mirror.close()

    def stop(self) -> None:
        """The build was interrupted: publish what is sent, begin nothing more."""
        self._push.stop.set()

    def _run(self) -> None:
        try:
            self._push.run(more=lambda: not self._built.is_set())
        except Eagle3Error as error:
            self.error = error
            if self.scratch is not None:
                self.scratch.abandon(error.message)

    def _deleted(self, name: str) -> None:
        if self.scratch is not None:
            self.scratch.gone(name)
