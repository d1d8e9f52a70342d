"""The fault suite: builder and server killed at random moments, again and again, invariants checked after each kill.

    python -m tests.chaos --kills 200 [--seed N]        (make chaos)

One process imports everything once and forks: the builder and the replaying server are real processes, killed with
SIGKILL. A build of one folder goes on through its kills until it completes; then the next folder begins. After each
kill: every shard of the manifest is there, byte for byte that of an undisturbed build (invariants 1, 2, 6), no sealed
file was touched again (8), nothing is counted twice (7), `status` knows that the builder is dead; the next start needs
no clean-up by hand (5).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import eagle3_data.builders.pool as pool
from eagle3_data.failures import read_failures
from eagle3_data.journal import journal_path
from eagle3_data.manifest import MANIFEST, Manifest
from eagle3_data.server.process import free_port
from eagle3_data.shards import ShardSet
from eagle3_data.status import read_status
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples
from tests.models import VOCAB, tiny_model
from tests.replay import SPEC, Faults, ReplayServer

VICTIMS = ("builder", "server", "both")
LIMIT_S = 120.0
"""A build that does not end in this time after its last kill hangs."""


class ChaosFailed(AssertionError):
    """An invariant did not hold; the message has the seed's story."""


def fork(work: Callable[[], None], log: Path) -> int:
    """Run `work` in a child, its output in `log`; the pid. The parent must have no threads but its own."""
    pid = os.fork()
    if pid:
        return pid
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Chaos:
    """`kills` of them over builds of `samples` samples in `folder`."""

    def __init__(self, folder: Path, *, kills: int, seed: int, samples: int = 240) -> None:
        self.folder, self.kills, self.chooser = folder, kills, random.Random(seed)
        self.builds = Builds(folder, tiny_model("llama"))
        self.count = samples
        self.samples = write_samples(folder / "s.jsonl", samples, seed=seed)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = self.builder = 0
        self.starts = 0
        self.killed: Counter[str] = Counter()
        self.moved = 0
        """Kills before which samples were placed since the kill before."""
        self.refused = 0
        """Builders that found no server when they asked it what it captures: refused by design, begun again."""
        self.victim = ""
        """Of the last kill."""
        self.calm: dict[str, bytes] = {}
        self.sealed: dict[str, tuple[int, int]] = {}
        pool.PROBE_S = 0.1

    @property
    def story(self) -> str:
        kills = f"{sum(self.killed.values())} kills ({dict(self.killed)})"
        return f"{kills}, {self.moved} amid work, {self.refused} starts without a server"

    # ---------------------------------------------------------------- the two processes

    def serve(self) -> None:
        seed = self.starts = self.starts + 1

        def work() -> None:
            faults = Faults(share=0.03, kinds=("500", "reset"), seed=seed)
            server = ReplayServer(self.folder / "spool", replace(SPEC, model=str(self.builds.model), vocab_size=VOCAB))
            server.faults, server.port, server.delay_s = faults, self.port, 0.01
            with server:
                signal.pause()

        self.server = fork(work, self.folder / "server.log")

    def build(self, out: str) -> None:
        def work() -> None:
            report = self.builds.run(
                out, self.samples, self.url, interval_s=0.02, retries=50, server_timeout_s=60.0, max_inflight=6
            )
            assert report.complete

        self.builder = fork(work, self.folder / f"{out}.log")

    def end(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def ended(self, pid: int) -> int | None:
        """Exit status of a child that has ended, None while it lives."""
        found, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None

    # ---------------------------------------------------------------- the story

    def run(self, say: Callable[[str], None]) -> None:
        try:
            self.serve()
            self._calm()
            number = 0
            while sum(self.killed.values()) < self.kills:
                self._disturbed(f"wild-{number}")
                shutil.rmtree(self.folder / f"wild-{number}")
                number += 1
                say(f"build {number} complete and identical, {self.story}")
        finally:
            for pid in (self.builder, self.server):
                if pid:
                    self.end(pid)

    def _calm(self) -> None:
        self.build("calm")
        self._wait("calm")
        self.calm = self.builds.shards("calm")
        if not verify(self.folder / "calm").ok:
            raise ChaosFailed("the undisturbed build does not verify")

    def _disturbed(self, out: str) -> None:
        self.sealed = {}
        self.build(out)
        while sum(self.killed.values()) < self.kills:
            self._wait_for_a_moment(out)
            status = self.ended(self.builder)
            if status == 0:
                break
            if status is not None and self.victim == "server" and "in _servers" in self._log(out):
                self.refused += 1
                (self.folder / f"{out}.log").unlink()
                self._wait_for_server()
                self.build(out)
                continue
            if status is not None:
                raise ChaosFailed(f"the builder ended with {status}:\n{self._log(out)}")
            self._kill(out)
        else:
            self._wait(out)
        self.builder = 0
        self._check_whole(out)

    def _wait_for_a_moment(self, out: str) -> None:
        """Any moment, for a quarter of the kills; else one after some samples more were placed."""
        more = 0 if self.chooser.random() < 0.25 else self.chooser.randrange(1, 25)
        pause, end = self.chooser.random() * 0.1, time.monotonic() + 10.0
        before = done = self._done(out)
        while done < before + more and time.monotonic() < end and self._runs():
            time.sleep(0.005)
            done = self._done(out)
        self.moved += done > before
        time.sleep(pause)

    def _done(self, out: str) -> int:
        return read_status(self.folder / out).done if journal_path(self.folder / out).exists() else 0

    def _runs(self) -> bool:
        """Whether the builder still runs; its status is left for `ended`."""
        return os.waitid(os.P_PID, self.builder, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def _kill(self, out: str) -> None:
        victim = self.victim = self.chooser.choice(VICTIMS)
        self.killed[victim] += 1
        if victim in ("builder", "both"):
            self.end(self.builder)
        if victim in ("server", "both"):
            self.end(self.server)
        self._check_after_kill(out, builder_dead=victim != "server")
        if victim in ("server", "both"):
            self.serve()
        if victim in ("builder", "both"):
            # a server that is not up yet is no reason to fail: wait as a user does
            self._wait_for_server()
            self.build(out)

    def _wait_for_server(self) -> None:
        import socket

        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.01)
        raise ChaosFailed(f"the server did not start:\n{(self.folder / 'server.log').read_text()[-2000:]}")

    def _wait(self, out: str) -> None:
        end = time.monotonic() + LIMIT_S
        while (status := self.ended(self.builder)) is None:
            if time.monotonic() > end:
                raise ChaosFailed(f"the build hangs: {read_status(self.folder / out)}")
            time.sleep(0.01)
        if status != 0:
            raise ChaosFailed(f"the builder ended with {status}:\n{self._log(out)}")

    def _log(self, out: str) -> str:
        return (self.folder / f"{out}.log").read_text()[-4000:]

    # ---------------------------------------------------------------- what must hold

    def _check_after_kill(self, out: str, *, builder_dead: bool) -> None:
        folder = self.folder / out
        if not (folder / MANIFEST).exists():
            return
        manifest = Manifest.load(folder)
        names = {row.name for row in manifest.shards}
        if lost := self.sealed.keys() - names:
            raise ChaosFailed(f"sealed shards left the manifest: {sorted(lost)}")
        for row in manifest.shards:
            path = folder / "data" / row.name
            stat = path.stat()
            if self.sealed.setdefault(row.name, (stat.st_ino, stat.st_mtime_ns)) != (stat.st_ino, stat.st_mtime_ns):
                raise ChaosFailed(f"{row.name} was written again after its seal")
            if path.read_bytes() != self.calm[row.name]:
                raise ChaosFailed(f"{row.name} is not the undisturbed build's")
        settled = manifest.saved + len(read_failures(folder)) + sum(manifest.plan.skipped.values())
        if settled > manifest.plan.planned or manifest.plan.planned != self.count:
            raise ChaosFailed(f"{settled} samples settled of {manifest.plan.planned}, {self.count} given")
        if builder_dead and journal_path(folder).exists():
            status = read_status(folder)
            if status.state not in ("DEAD", "COMPLETE") or status.done > status.of or status.of != self.count:
                raise ChaosFailed(f"status of a killed builder: {status}")

    def _check_whole(self, out: str) -> None:
        folder = self.folder / out
        if self.builds.shards(out) != self.calm:
            raise ChaosFailed("the shards are not the undisturbed build's")
        if problems := verify(folder).problems:
            raise ChaosFailed(f"verify: {problems}")
        if len(set(ShardSet.open(folder).keys)) != self.count:
            raise ChaosFailed("a sample is missing or there twice")
        if hidden := [path.name for path in (folder / "data").iterdir() if path.name.startswith(".")]:
            raise ChaosFailed(f"left behind: {hidden}")
        status = read_status(folder)
        if (status.state, status.done, status.failed) != ("COMPLETE", self.count, {}):
            raise ChaosFailed(f"status of a finished build: {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="eagle3-chaos-") as folder:
        chaos = Chaos(Path(folder), kills=options.kills, seed=options.seed)
        try:
            chaos.run(lambda text: print(text, flush=True))
        except BaseException as error:
            raise SystemExit(f"FAILED with seed {options.seed} after {dict(chaos.killed)}: {error}") from error
    print(f"{chaos.story}; every invariant held; seed {options.seed}")


if __name__ == "__main__":
    main()
