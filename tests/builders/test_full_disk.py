"""A disk without space, whatever is being written: the run waits, says so in `status`, goes on, the bytes are right."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import eagle3_data.builders.plan as plan
import eagle3_data.builders.sink as sink
import eagle3_data.shards.writer as writer
from eagle3_data import durable
from eagle3_data.builders.build import build
from eagle3_data.builders.plan import allocated
from eagle3_data.errors import BuildFailed, DiskFull
from eagle3_data.journal import Journal, Tick, journal_path, read_tail
from eagle3_data.manifest import Manifest
from eagle3_data.shards.layout import END_BYTES
from eagle3_data.status import read_status
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples
from tests.builders.test_encoded_builds import bf16_server
from tests.models import tiny_model
from tests.replay import SPEC, Faults
from tests.test_status import START

DISK = 4 << 20
SAMPLES = 40


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "DISK_POLL_S", 0.02)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


class Ballast:
    """Takes all the space that is left, and gives it back."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ballast"

    def fill(self) -> None:
        with open(self.path, "ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)

    def free(self) -> None:
        self.path.unlink(missing_ok=True)

    @property
    def there(self) -> bool:
        return self.path.exists()


def full(*arguments: object, **names: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device", "a-file")


class Times:
    """Calls the real thing, except the first `count` times since `arm`."""

    def __init__(self, real: Callable[..., Any], count: int = 3) -> None:
        self.real, self.left, self.met = real, count, 0

    def __call__(self, *arguments: Any, **names: Any) -> Any:
        # a shard's end is written into space that was reserved: no disk is full there
        end = len(arguments) == 3 and arguments[1] == bytes(END_BYTES)
        if self.left and not end:
            self.left -= 1
            self.met += 1
            full()
        return self.real(*arguments, **names)


class Calm:
    """Undisturbed builds of the same samples, made once per encoding."""

    def __init__(self, folder: Path) -> None:
        self.builds, self._found = Builds(folder, tiny_model("llama")), dict[str, dict[str, bytes]]()
        self.samples = write_samples(folder / "s.jsonl", SAMPLES, lengths=(20, 60))

    def shards(self, encoding: str = "bf16") -> dict[str, bytes]:
        if encoding not in self._found:
            with bf16_server(self.builds, bad()) as server:
                report = self.builds.run(
                    encoding, self.samples, server.url, max_inflight=1, max_failure_share=1.0, encoding=encoding
                )
            assert report.failed == {"rejected": 2}
            self._found[encoding] = self.builds.shards(encoding)
        return self._found[encoding]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return Calm(tmp_path_factory.mktemp("calm"))


def bad() -> Faults:
    """Some samples are rejected, so that the ledger has rows and the seals have gaps to close."""
    return Faults(reply={3: "400", 11: "400"})


@pytest.mark.parametrize("where", ["reserve", "index", "rename", "manifest", "notes", "ledger", "bytes", "card"])
def test_every_write_waits_for_space(builds: Builds, calm: Calm, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    spots: dict[str, tuple[Any, str, Any]] = {
        "bytes": (writer, "write_at", writer.write_at),
        "reserve": (writer.os, "posix_fallocate", os.posix_fallocate),
        "index": (writer, "write_part", writer.write_part),
        "rename": (writer.os, "replace", os.replace),
        "manifest": (Manifest, "save", Manifest.save),
        "card": (__import__("eagle3_data.builders.build", fromlist=["x"]), "write_card", None),
    }
    seen: list[str] = []
    with bf16_server(builds, bad()) as server:
        config = builds.config("out", calm.samples, server.url, max_inflight=1, max_failure_share=1.0, interval_s=0.01)
        times: list[Times] = []

        def begin(tick: Tick) -> None:
            seen.append(read_status(config.out).note)
            if times:
                return
            if where in ("notes", "ledger"):
                times.append(Times(durable.Lines.write))
                wanted = ".placed" if where == "notes" else "failures.jsonl"

                def write(lines: durable.Lines, line: str) -> None:
                    if str(lines.path).endswith(wanted) and times[0].left:
                        times[0].left -= 1
                        times[0].met += 1
                        raise DiskFull(f"no space for {lines.path}")
                    times[0].real(lines, line)

                monkeypatch.setattr(durable.Lines, "write", write)
                return
            module, name, real = spots[where]
            times.append(Times(real or getattr(module, name)))
            one = times[0]
            monkeypatch.setattr(module, name, lambda *a, **k: one(*a, **k))

        report = build(config, on_tick=begin, on_text=builds.texts.append)
    assert times[0].met == (2 if where == "ledger" else 3), "the disk was full"
    assert report.complete
    assert (report.saved, report.failed) == (SAMPLES - 2, {"rejected": 2})
    assert where == "ledger" or any("no space" in note for note in seen), "status says what is waited for"
    assert builds.shards("out") == calm.shards()
    assert verify(config.out).problems == []
    assert len((config.out / "failures.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("encoding", ["bf16", "bf16-planes"])
def test_a_real_disk_fills_up_again_and_again(
    builds: Builds, calm: Calm, small_disk: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Whoever shares the disk takes every free byte, before each step of a seal in turn, and later gives it back."""
    whole = calm.shards(encoding)
    assert sum(map(len, whole.values())) > DISK // 8
    ballast, began, notes = Ballast(small_disk), list[Tick](), list[str]()
    filled = iter(range(10**6))

    def before(real: Callable[..., Any], every: int) -> Callable[..., Any]:
        def call(*arguments: Any, **names: Any) -> Any:
            if next(filled) % every == 0:
                ballast.fill()
            return real(*arguments, **names)

        return call

    def watch(tick: Tick) -> None:
        if not began:
            began.append(tick)
            monkeypatch.setattr(writer, "copy_range", before(writer.copy_range, 7))
            monkeypatch.setattr(writer, "write_part", before(writer.write_part, 2))
            monkeypatch.setattr(writer.OpenShard, "_compact", before(writer.OpenShard._compact, 3))
            monkeypatch.setattr(Manifest, "save", before(Manifest.save, 2))
            ballast.fill()
            return
        note = read_status(small_disk / "out").note
        if ballast.there and "no space" in note:
            notes.append(note)
            ballast.free()

    with bf16_server(builds, bad()) as server:
        config = builds.config(
            "disk/out",
            calm.samples,
            server.url,
            max_inflight=1,
            max_failure_share=1.0,
            interval_s=0.01,
            encoding=encoding,
        )
        report = build(config, on_tick=watch, on_text=builds.texts.append)
    ballast.free()
    assert report.complete
    assert len(notes) >= 5
    assert builds.shards("disk/out") == whole
    assert verify(config.out).problems == []
    assert read_status(config.out).state == "COMPLETE"


def test_a_seal_that_broke_off_while_moving_is_not_begun_again(
    builds: Builds, calm: Calm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space was reserved and the disk is full all the same: the run ends, the next captures what does not hold."""
    with bf16_server(builds, bad()) as server:
        with monkeypatch.context() as patch:
            patch.setattr(writer, "move_left", full)
            from eagle3_data.errors import BuildFailed

            with pytest.raises(BuildFailed, match="could not be closed"):
                builds.run("out", calm.samples, server.url, max_inflight=1, max_failure_share=1.0)
        server.faults = Faults()
        report = builds.run("out", calm.samples, server.url, max_inflight=1, max_failure_share=1.0)
    assert report.complete
    assert builds.shards("out") == calm.shards()
    assert verify(builds.folder / "out").ok


def test_a_remote_dump_waits_for_local_space(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    import eagle3_data.server.client as client

    samples = write_samples(builds.folder / "s.jsonl", 10)
    one = Times(client._store)

    async def store(*arguments: Any) -> None:
        await one(*arguments)

    monkeypatch.setattr(client, "_store", store)
    with builds.server() as server:
        (server.spool / f".server-{server.instance}").unlink()
        report = builds.run("out", samples, server.url, interval_s=0.01)
        assert len(server.requests) == 10, "the dump stays at its server and is fetched again, not made again"
    assert (report.saved, report.retried, one.met) == (10, {}, 3)


def test_a_disk_that_is_full_at_the_start_is_said(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 4)
    with builds.server() as server:
        with monkeypatch.context() as patch:
            patch.setattr(Manifest, "save", full)
            with pytest.raises(DiskFull, match="no space for a-file") as found:
                builds.run("out", samples, server.url)
        assert "repeat the command" in found.value.next
        assert builds.run("out", samples, server.url).complete


@pytest.mark.parametrize("encoding", ["bf16", "bf16-planes"])
def test_a_resume_counts_what_its_open_shards_have_taken(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """The whole build fits on the disk; killed with most of it placed in shards that are not sealed, it still does."""
    samples, data = write_samples(builds.folder / "s.jsonl", 60), builds.folder / "out/data"
    disk, placed = [1 << 40], [0]

    def usage(path: object) -> SimpleNamespace:
        return SimpleNamespace(free=disk[0] - allocated(data, "*"))

    async def place(self: sink.ShardSink, *arguments: Any) -> None:
        await real(self, *arguments)
        placed[0] += 1
        if placed[0] == 40:
            raise RuntimeError("killed")

    real = sink.ShardSink.place
    monkeypatch.setattr(plan, "shutil", SimpleNamespace(disk_usage=usage))  # the spool has space
    changes: dict[str, Any] = {"max_inflight": 1, "shard_bytes": 4 << 20, "encoding": encoding}
    with bf16_server(builds) as server:
        with monkeypatch.context() as patched:
            patched.setattr(sink.ShardSink, "place", place)
            with pytest.raises(RuntimeError, match="killed"):
                builds.run("out", samples, server.url, **changes)
        manifest = Manifest.load(builds.folder / "out")
        there = plan.written_bytes(builds.folder / "out", manifest)
        assert manifest.shards == ()
        assert there == allocated(data, ".*.tmp") > manifest.plan.nbytes // 2
        disk[0] = manifest.plan.nbytes + there // 4
        with monkeypatch.context() as patched:
            patched.setattr(plan, "allocated", lambda folder, pattern: 0)
            small = SimpleNamespace(free=disk[0] - there)
            patched.setattr(plan, "shutil", SimpleNamespace(disk_usage=lambda path: small))
            with pytest.raises(BuildFailed, match="the shards need"):
                builds.run("out", samples, server.url, **changes)
        assert builds.run("out", samples, server.url, **changes).complete
    assert verify(builds.folder / "out").ok


def test_what_lies_here_is_part_of_the_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan.Plan(np.full(100, 100, np.int32), SPEC, 64 << 10)
    (tmp_path / "data").mkdir()
    for name in ("train-000000.tar", ".train-000001.tar.tmp"):
        (tmp_path / "data" / name).write_bytes(bytes(64 << 10))
    free = [0]
    monkeypatch.setattr(plan, "shutil", SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=free[0])))

    def check() -> None:
        plan.check_plan(
            planned, tmp_path, written=0, context_length=1000, key_of=str, scratch_bytes=planned.nbytes // 2
        )

    free[0] = planned.nbytes // 2 - (128 << 10)
    assert free[0] > 0
    check()
    free[0] -= 4096
    with pytest.raises(BuildFailed, match="the shards need"):
        check()


def test_ctrl_c_while_the_disk_is_full(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 10)

    began: list[Tick] = []

    def interrupt(tick: Tick) -> None:
        if not began:
            began.append(tick)
            monkeypatch.setattr(Manifest, "save", full)
        elif "no space" in tick.note and len(began) == 1:
            began.append(tick)
            os.kill(os.getpid(), 2)

    with builds.server() as server:
        server.delay_s = 0.05
        with monkeypatch.context():
            config = builds.config("out", samples, server.url, interval_s=0.01)
            report = build(config, on_tick=interrupt, on_text=builds.texts.append)
        assert not report.complete
        assert read_status(config.out).state == "INTERRUPTED"
        monkeypatch.undo()
        assert builds.run("out", samples, server.url).saved == 10


def tick(number: int, **changes: Any) -> Tick:
    from dataclasses import replace

    return replace(START, event="tick", done=number, **changes)


def test_the_journal_has_room_on_a_full_disk(small_disk: Path) -> None:
    """More ticks than there is room for: the newest is always there, nothing before is lost, the end is clean."""
    ballast, journal = Ballast(small_disk), Journal(small_disk)
    journal.write(tick(0))
    ballast.fill()
    for number in range(1, 200):
        journal.write(tick(number, note="waiting: no space " + "x" * (number % 50)))
        last = read_tail(journal_path(small_disk))[-1]
        assert (last.done, last.note.startswith("waiting")) == (number, True)
    found = [one.done for one in read_tail(journal_path(small_disk))]
    assert found[:5] == [0, 1, 2, 3, 4]
    ballast.free()
    for number in range(200, 300):
        journal.write(tick(number))
    journal.close()
    assert [one.done for one in read_tail(journal_path(small_disk))][-101:] == list(range(199, 300))
    text = journal_path(small_disk).read_text()
    assert text.endswith("}\n")
    assert "\n\n" not in text


@pytest.mark.parametrize("torn", [b"", b'{"event": "tick", "t": 1', b'{"event": "tick"}\n', b"\n" * 20000])
def test_the_journal_goes_on_behind_whatever_is_there(tmp_path: Path, torn: bytes) -> None:
    first = Journal(tmp_path)
    first.write(tick(1))
    with journal_path(tmp_path).open("ab") as file:  # killed: its room is still there
        file.write(torn)
    second = Journal(tmp_path)
    second.write(tick(2))
    assert [one.done for one in read_tail(journal_path(tmp_path))] == [1, 2]
    second.close()
    assert [one.done for one in read_tail(journal_path(tmp_path))] == [1, 2]
