"""Kill -9 of the builder at random moments: nothing sealed is lost, nothing is there twice, the bytes are the same."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_data.manifest import Manifest
from eagle3_data.server.process import free_port
from eagle3_data.shards import ShardSet
from eagle3_data.status import read_status
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples

DRIVER = """
import sys
from pathlib import Path
from tests.builders.conftest import Builds
builds = Builds(Path(sys.argv[1]), Path(sys.argv[2]))
report = builds.run(sys.argv[3], Path(sys.argv[4]), sys.argv[5], interval_s=0.05)
print("COMPLETE" if report.complete else "STOPPED")
"""


@pytest.fixture
def replay_process(builds: Builds) -> Iterator[str]:
    """The replaying server in a process of its own, slow enough to be caught in the middle."""
    port = free_port()
    code = (
        "import sys, threading; from dataclasses import replace; from pathlib import Path\n"
        "from tests.replay import SPEC, ReplayServer\n"
        f"server = ReplayServer(Path({str(builds.folder / 'spool')!r}), "
        f"replace(SPEC, model={str(builds.model)!r}, vocab_size=768))\n"
        f"server.port, server.delay_s = {port}, 0.02\n"
        "server.__enter__(); print('up', flush=True); threading.Event().wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def start(builds: Builds, out: str, samples: Path, url: str) -> subprocess.Popen[bytes]:
    arguments = [str(builds.folder), str(builds.model), out, str(samples), url]
    return subprocess.Popen([sys.executable, "-c", DRIVER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for_progress(folder: Path, above: int, process: subprocess.Popen[bytes]) -> int:
    """Until the journal shows more than `above` samples done, or the process ends."""
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            done = read_status(folder).done
        except Exception:  # the folder is not there yet
            done = 0
        if done > above:
            return done
        time.sleep(0.005)
    return above


@pytest.mark.slow
def test_killed_builders_lose_nothing(builds: Builds, replay_process: str) -> None:
    """Invariants 1, 5, 6, 7 after each kill; the finished build is byte for byte the undisturbed one."""
    samples, chooser = write_samples(builds.folder / "s.jsonl", 260), random.Random(7)
    out, kills, done = builds.folder / "out", 0, 0
    sealed: dict[str, bytes] = {}
    while kills < 4:
        process = start(builds, "out", samples, replay_process)
        before = done
        done = wait_for_progress(out, before + chooser.randrange(0, 50), process)
        time.sleep(chooser.random() * 0.2)
        process.kill()
        output, errors = process.communicate()
        if b"COMPLETE" in output:
            break
        assert b"Error" not in errors, errors.decode()
        kills += 1
        if not (out / "manifest.json").exists():
            continue
        manifest = Manifest.load(out)
        now = builds.shards("out")
        listed = {row.name: now[row.name] for row in manifest.shards}
        assert sealed.items() <= listed.items(), "a sealed shard was lost or rewritten"
        sealed = listed
        checked = verify(out)
        assert not [p for p in checked.problems if "not in the manifest" not in p.what]
        assert read_status(out).state == "DEAD"
    assert kills >= 2
    last = start(builds, "out", samples, replay_process)
    output, errors = last.communicate()
    assert b"COMPLETE" in output, errors.decode()
    assert builds.run("calm", samples, replay_process).complete
    assert builds.shards("out") == builds.shards("calm")
    assert verify(out).ok
    assert len(set(ShardSet.open(out).keys)) == 260
    hidden = [path.name for path in (out / "data").iterdir() if path.name.startswith(".")]
    assert hidden == []
    run = Manifest.load(out).run
    assert list((builds.folder / "spool").glob(f"e3d-{run}-*")) == []


def test_ctrl_c_keeps_what_was_placed(builds: Builds, replay_process: str) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 400)
    process = start(builds, "out", samples, replay_process)
    wait_for_progress(builds.folder / "out", 40, process)
    process.send_signal(2)
    output, errors = process.communicate(timeout=30)
    assert b"STOPPED" in output, errors.decode()
    status = read_status(builds.folder / "out")
    assert status.state == "INTERRUPTED"
    assert 40 < status.done < 400
    report = builds.run("out", samples, replay_process)
    assert (report.resumed, report.sent) == (status.done, 400 - status.done)
    assert report.complete


@pytest.mark.parametrize("stop_after", ["rename", "index", "notes"])
def test_crash_around_the_seal(builds: Builds, monkeypatch: pytest.MonkeyPatch, stop_after: str) -> None:
    """The few instructions around a seal, each as the last one before the crash."""
    import eagle3_data.shards.writer as writer
    from eagle3_data.builders.sink import ShardSink

    class Crash(BaseException):
        pass

    def crash(*args: object) -> None:
        raise Crash

    samples = write_samples(builds.folder / "s.jsonl", 60)
    with builds.server() as server:
        with monkeypatch.context() as patch:
            if stop_after == "rename":
                patch.setattr(ShardSink, "_record", crash)
            elif stop_after == "index":
                patch.setattr(writer.durable, "fsync_dir", crash)
                patch.setattr(writer.os, "replace", crash)
            else:
                patch.setattr(writer.OpenShard, "forget", crash)
            with pytest.raises(Crash):
                builds.run("out", samples, server.url)
        report = builds.run("out", samples, server.url)
        assert report.complete
        builds.run("calm", samples, server.url)
    assert builds.shards("out") == builds.shards("calm")
    assert verify(builds.folder / "out").ok


def test_full_disk_waits_and_goes_on(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    import eagle3_data.builders.sink as sink
    import eagle3_data.shards.writer as writer

    real, failures = writer.write_at, iter([True] * 5)

    def full(fd: int, data: bytes, offset: int) -> None:
        if next(failures, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, data, offset)

    monkeypatch.setattr(writer, "write_at", full)
    monkeypatch.setattr(sink, "DISK_POLL_S", 0.2)
    samples = write_samples(builds.folder / "s.jsonl", 20)
    with builds.server() as server:
        report = builds.run("out", samples, server.url, interval_s=0.05)
    assert report.complete
    assert report.saved == 20
    assert any("no space" in tick.note for tick in builds.ticks)
    assert verify(builds.folder / "out").ok


def test_torn_lines_do_not_matter(builds: Builds) -> None:
    """Every file that is appended to may end in half a line."""
    samples = write_samples(builds.folder / "s.jsonl", 40)
    with builds.server() as server:
        builds.run("out", samples, server.url)
        for name in (".build/journal.jsonl", "failures.jsonl"):
            with (builds.folder / "out" / name).open("a") as file:
                file.write('{"event": "tick", "t": 1')
        assert read_status(builds.folder / "out").state == "COMPLETE"
        assert builds.run("out", samples, server.url).sent == 0
    text = (builds.folder / "out/failures.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == []


@pytest.mark.parametrize("where", ["seal", "tick", "give_up", "requeue"])
def test_an_error_in_any_task_ends_the_run(builds: Builds, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """No task of a run dies unheard: its error is the run's, and no later stage calls the build complete."""
    from eagle3_data.builders.extract import Extractor
    from eagle3_data.builders.sink import ShardSink
    from tests.replay import Faults

    def broken(*args: object) -> None:
        raise ZeroDivisionError("not one of ours")

    async def broken_task(*args: object) -> None:
        broken()

    samples = write_samples(builds.folder / "s.jsonl", 40)
    with builds.server(Faults(reply={3: "400", 5: "500"})) as server:
        server.delay_s = 0.02
        with monkeypatch.context() as patch:
            if where == "seal":
                patch.setattr(ShardSink, "seal_if_settled", broken_task)
            elif where == "tick":
                patch.setattr(Extractor, "_sweep", broken_task)
            elif where == "give_up":
                patch.setattr(ShardSink, "give_up", broken)
            else:
                patch.setattr(Extractor, "_requeue", broken_task)
            with pytest.raises(ZeroDivisionError):
                builds.run("out", samples, server.url, interval_s=0.01, max_inflight=2)
        assert read_status(builds.folder / "out").state == "FAILED"
        assert Manifest.load(builds.folder / "out").state == "building"
        server.faults = Faults()
        assert builds.run("out", samples, server.url, retry_failed=True).saved == 40
    assert verify(builds.folder / "out").ok
