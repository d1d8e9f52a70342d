"""The scheduler's side of the process that writes, with the real process: dumps, memory, and a process that dies."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3_data.patches.sglang import writers as writers_module
from eagle3_data.patches.sglang.copier import Copier
from eagle3_data.patches.sglang.dumps import DumpForm
from eagle3_data.patches.sglang.messages import Report
from eagle3_data.patches.sglang.rows import Prompt, Segment
from eagle3_data.patches.sglang.states import BatchStates
from eagle3_data.patches.sglang.writers import Work, Writers
from eagle3_data.protocol import AUX, IDS, LAST, DumpError, SpoolConfig
from tests.patches.test_pool import settled
from tests.patches.views import prompt
from tests.servers import read_dump

FORM = DumpForm(layers=(1, 3), width=16, dtype="bfloat16", instance="test")
ARENA = 1 << 20


class Server:
    """A copier and writers, as a scheduler has them."""

    def __init__(self, spool: Path, **settings: Any) -> None:
        self.spool, self.copier = spool, Copier("cpu", ARENA)
        self.writers = Writers(spool, SpoolConfig(**{"writers": 3, **settings}), FORM, self.copier.arena)

    def batch(self, *parts: tuple[Prompt, int, int], done: Any = None) -> BatchStates:
        """One batch; parts are (prompt, first row, rows)."""
        rows = sum(count for _, _, count in parts)
        states = BatchStates(torch.randn(rows, 32).bfloat16(), torch.randn(rows, 16).bfloat16(), torch.randn(8, 50))
        segments, offset = [], 0
        for index, (one, start, count) in enumerate(parts):
            one.seen = start + count
            segments.append(Segment(one, offset, start, count, index, one.seen == one.tokens))
            offset += count
        work = Work()
        copied, _ = self.copier.copy(states, segments)
        for segment, rows_there in zip(segments, copied, strict=True):
            assert rows_there is not None
            work.rows(segment.prompt, segment.start, rows_there)
        self.writers.put(work, done)
        return states

    def fail(self, one: Prompt, reason: str) -> None:
        work = Work()
        work.fail(one, reason, "said the test")
        self.writers.put(work, None)

    def at_rest(self) -> None:
        """Nothing is kept of anything."""
        settled(lambda: self.copier.arena.free_bytes() == ARENA)
        settled(lambda: not self.writers._open and not self.writers._blocks)
        assert self.writers.counters.backlog_bytes == 0

    def dump(self, name: str) -> Path:
        path = self.spool / f"e3d-r-{name}-0.safetensors"
        settled(path.exists)
        return path

    def error(self, name: str) -> DumpError:
        path = self.spool / f"e3d-r-{name}-0.error.json"
        settled(path.exists)
        return DumpError.from_json(path.read_text())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.writers.close()


def counts(server: Server) -> tuple[int, int]:
    return server.writers.counters.written, server.writers.counters.failed


def test_prompts_of_a_batch_and_in_chunks_become_dumps(server: Server) -> None:
    a, b = prompt("a", 5), prompt("b", 9)
    first = server.batch((a, 0, 5), (b, 0, 4))
    second = server.batch((b, 4, 5))
    meta, tensors = read_dump(server.dump("a"))
    assert isinstance(first.aux, torch.Tensor)
    assert isinstance(second.aux, torch.Tensor)
    assert first.logits is not None
    assert (meta.tokens, meta.finite, meta.next_token) == (5, True, int(first.logits[0].argmax()))
    assert torch.equal(tensors[AUX], first.aux[:5])
    assert torch.equal(tensors[LAST], first.last[:5])
    _, tensors = read_dump(server.dump("b"))
    assert torch.equal(tensors[AUX], torch.cat([first.aux[5:], second.aux]))
    assert torch.equal(tensors[LAST], torch.cat([first.last[5:], second.last]))
    assert tensors[IDS].tolist() == list(b.ids)
    settled(lambda: counts(server) == (2, 0))
    server.at_rest()
    assert a.over
    assert b.over


def test_rows_are_not_read_before_the_copies_are_done(server: Server) -> None:
    before: list[list[Path]] = []

    def synchronize() -> None:
        time.sleep(0.3)
        before.append(list(server.spool.iterdir()))

    server.batch((prompt("a", 5), 0, 5), done=SimpleNamespace(synchronize=synchronize))
    server.dump("a")
    assert before == [[]]


def test_states_that_the_device_lost_are_an_error_record(server: Server) -> None:
    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    server.batch((prompt("a", 5), 0, 5), done=SimpleNamespace(synchronize=synchronize))
    assert (server.error("a").reason, "illegal memory" in server.error("a").detail) == ("internal", True)
    server.batch((prompt("b", 5), 0, 5))
    server.dump("b")


def test_a_failed_prompt_gives_everything_back_and_its_first_reason_stands(server: Server) -> None:
    a = prompt("a", 9)
    server.batch((a, 0, 4))
    server.fail(a, "pinned_full")
    server.fail(a, "internal")
    assert server.error("a").reason == "pinned_full"
    server.batch((a, 4, 5))  # claimed before it was known
    server.fail(prompt("b", 9), "rows")  # nothing was written of it
    assert server.error("b").reason == "rows"
    settled(lambda: counts(server) == (0, 2))
    server.at_rest()


def test_a_restarted_prompt_leaves_one_right_dump(server: Server) -> None:
    first, second, work = prompt("a", 6), prompt("a", 6), Work()
    server.batch((first, 0, 4))
    work.abandon(first)
    server.writers.put(work, None)
    states = server.batch((second, 0, 6))
    assert torch.equal(read_dump(server.dump("a"))[1][LAST], states.last)
    settled(lambda: counts(server) == (1, 0))
    server.at_rest()
    assert [path.name for path in server.spool.iterdir()] == ["e3d-r-a-0.safetensors"]


def test_prompts_that_never_end_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers_module, "SWEEP_S", 0.05)
    server = Server(tmp_path, temp_age_s=0.5)
    server.batch((prompt("aborted", 4, finished=True), 0, 2), (prompt("silent", 4), 0, 2))
    assert (server.error("aborted").reason, server.error("aborted").detail) == (
        "aborted",
        "the request ended after 2 of 4 rows",
    )
    assert server.error("silent").reason == "aborted"
    settled(lambda: not list(tmp_path.glob(".*.tmp")))
    server.at_rest()
    server.writers.close()


def test_a_process_that_is_killed_leaves_error_records_and_another_one_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers_module, "RESTART_S", 0.3)
    server.batch((prompt("whole", 3), 0, 3))
    server.dump("whole")
    settled(lambda: counts(server) == (1, 0))
    half, first = prompt("half", 9), server.writers.process.pid
    server.batch((half, 0, 4))
    settled(lambda: list(server.spool.glob(".e3d-r-half-0.*.tmp")))
    os.kill(first, signal.SIGKILL)
    assert server.error("half").reason == "internal"
    assert "exit code -9" in server.error("half").detail
    assert half.over
    assert not list(server.spool.glob(".*.tmp"))
    server.batch((half, 4, 5), (prompt("next", 5), 0, 5))  # while there is no process
    server.dump("next")
    settled(lambda: counts(server) == (2, 1))
    server.at_rest()
    assert server.writers.process.pid != first


def test_a_message_that_is_no_use_ends_the_process_and_not_the_capture(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers_module, "RESTART_S", 0.1)
    server.batch((prompt("half", 9), 0, 4))
    assert server.writers._connection is not None
    server.writers._connection.send_bytes(b"no message")
    assert server.error("half").reason == "internal"
    server.batch((prompt("next", 5), 0, 5))
    server.dump("next")


def test_a_process_that_dies_while_it_is_told_something(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the socket that is sent to stays open until the sender is done: its number may be another file's."""
    monkeypatch.setattr(writers_module, "RESTART_S", 0.1)
    send: Any = Connection._send  # type: ignore[attr-defined]
    first = server.writers.process.pid

    def die(connection: Connection, *arguments: Any) -> None:
        if threading.current_thread() is server.writers._threads[0] and server.writers.process.pid == first:
            os.kill(first, signal.SIGKILL)
            settled(lambda: server.writers.process.pid != first)
        send(connection, *arguments)

    monkeypatch.setattr(Connection, "_send", die)
    server.batch((prompt("a", 5), 0, 5))
    assert server.error("a").reason == "internal"
    server.batch((prompt("b", 5), 0, 5))
    server.dump("b")
    server.at_rest()


def test_a_prompt_that_fails_on_both_sides_fails_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    note, read = server.writers._note, threading.Event()

    def note_later(report: Report) -> None:
        assert read.wait(30)
        note(report)

    monkeypatch.setattr(server.writers, "_note", note_later)
    a = prompt("a", 9)
    server.batch((a, 0, 4))
    server.batch((a, 6, 1))  # the process that writes cannot go on with it
    assert "rows from 6" in server.error("a").detail
    server.fail(a, "pinned_full")  # before that is known
    server.batch((prompt("b", 5), 0, 5))
    server.dump("b")
    read.set()
    settled(lambda: counts(server) == (1, 1))
    server.at_rest()
    assert "rows from 6" in server.error("a").detail


def test_a_prompt_swept_while_it_is_put_ends_once(server: Server) -> None:
    class Slow(queue.SimpleQueue[Any]):
        """Something else happens before the scheduler thread's item is in."""

        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            if threading.current_thread() is threading.main_thread() and item is not None:
                threading.Thread(target=server.writers._sweep, args=(time.monotonic(),)).start()
                time.sleep(0.2)
            super().put(item)

    then, server.writers._queue = server.writers._queue, Slow()
    then.put((0, [], None))  # `_send` looks at the new one from here on
    server.batch((prompt("a", 4, finished=True), 0, 2))
    assert server.error("a").reason == "aborted"
    server.batch((prompt("b", 5), 0, 5))
    server.dump("b")
    server.at_rest()
    settled(lambda: counts(server) == (1, 1))
    assert not list(server.spool.glob(".*.tmp"))


def test_what_was_written_but_not_reported_is_no_failure(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers_module, "RESTART_S", 0.1)
    monkeypatch.setattr(server.writers, "_note", lambda report: None)
    server.batch((prompt("a", 5), 0, 5))
    server.dump("a")
    monkeypatch.undo()
    monkeypatch.setattr(writers_module, "RESTART_S", 0.1)
    first = server.writers.process.pid
    server.writers.process.kill()
    settled(lambda: server.writers.process.pid != first)
    server.at_rest()
    assert counts(server) == (1, 0)
    assert [path.name for path in server.spool.iterdir()] == ["e3d-r-a-0.safetensors"]


def broken(folder: Path) -> str:
    """A Python that cannot start our process."""
    path = folder / "broken"
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    return str(path)


def test_a_process_that_cannot_start_is_said_at_once(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", broken(tmp_path_factory.mktemp("python")))
    with pytest.raises(OSError, match="exit code 3"):
        Server(tmp_path)


def test_while_no_process_can_be_started_every_prompt_gets_its_error_record(
    server: Server, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers_module, "RESTART_S", 0.1)
    good = sys.executable
    for python in (broken(tmp_path_factory.mktemp("python")), "/nonexistent"):
        monkeypatch.setattr(sys, "executable", python)
        if server.writers.process.poll() is None:
            server.writers.process.kill()
        name = Path(python).name
        for part in "12":
            server.batch((prompt(f"{name}_{part}", 5), 0, 5))
            assert server.error(f"{name}_{part}").reason == "internal"
            server.at_rest()
    monkeypatch.setattr(sys, "executable", good)
    last = server.writers.process.pid
    settled(lambda: server.writers.process.pid != last)
    server.batch((prompt("b", 5), 0, 5))
    server.dump("b")
    settled(lambda: counts(server) == (1, 4))


def test_a_default_timeout_of_sockets_is_not_ours(tmp_path: Path) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.01)
    try:
        server = Server(tmp_path)
    finally:
        socket.setdefaulttimeout(before)
    first = server.writers.process.pid
    server.batch((prompt("a", 5), 0, 5))
    server.dump("a")
    assert server.writers.process.pid == first
    server.writers.close()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python always looks in the working directory")
def test_the_working_directory_is_no_place_for_modules(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("cwd")
    (elsewhere / "xxhash.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(elsewhere)
    server = Server(tmp_path)
    server.batch((prompt("a", 5), 0, 5))
    assert server.dump("a").exists()
    server.writers.close()


def test_a_stopped_process_holds_up_nobody(server: Server) -> None:
    """Far more than the socket takes is put meanwhile, and all of it is written later."""
    os.kill(server.writers.process.pid, signal.SIGSTOP)
    try:
        for index in range(40):
            work = Work()
            work.fail(prompt(f"x{index}", 5), "pinned_full", "x" * 50_000)
            server.writers.put(work, None)
        server.batch((prompt("a", 5), 0, 5))
        assert not list(server.spool.iterdir())
    finally:
        os.kill(server.writers.process.pid, signal.SIGCONT)
    server.dump("a")
    settled(lambda: counts(server) == (1, 40))
    server.at_rest()


def test_signals_to_the_group_are_for_the_scheduler(server: Server) -> None:
    server.batch((prompt("a", 5), 0, 5))
    server.dump("a")
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(server.writers.process.pid, number)
    server.batch((prompt("b", 5), 0, 5))
    server.dump("b")
    assert server.writers.process.poll() is None


def test_it_ends_with_a_scheduler_that_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        sys.path.insert(0, {str(Path.cwd())!r})
        from tests.patches.test_writers import Server
        print(Server(Path({str(tmp_path)!r})).writers.process.pid, flush=True)
        time.sleep(60)
    """)
    scheduler = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert scheduler.stdout is not None
    writer = int(scheduler.stdout.readline())
    assert Path(f"/proc/{writer}").exists()
    scheduler.kill()
    scheduler.wait()
    settled(lambda: not Path(f"/proc/{writer}").exists() or "Z" in Path(f"/proc/{writer}/stat").read_text())


def test_the_process_is_small() -> None:
    """It is started beside a model that fills the machine."""
    check = "import sys, eagle3_data.patches.sglang.writing; print({'torch', 'numpy', 'sglang'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True).stdout == "set()\n"
