"""`--engine ray` on a real Ray cluster of this machine: two workers, two servers, a worker killed, Ctrl-C, a resume."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_data.builders.ray_crew import build_on_ray
from eagle3_data.cli import main
from eagle3_data.errors import ConfigError
from eagle3_data.journal import Tick, journal_path, read_tail
from eagle3_data.manifest import Manifest
from eagle3_data.runlock import holder, work_folder
from eagle3_data.status import read_status
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples
from tests.builders.test_build import check_content

SAMPLES = 160


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two CPUs, a small object store, nothing sent home."""
    ray = pytest.importorskip("ray")
    folder = Path(tempfile.mkdtemp(prefix="e3ray-", dir="/tmp"))  # short, for the names of its sockets
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(
            num_cpus=2,
            object_store_memory=80 << 20,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(folder),
        )
        yield
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def command(builds: Builds, samples: Path, *urls: str) -> list[str]:
    """The command line of the build, two prompts at a time."""
    servers = [word for url in urls for word in ("--server", url)]
    options = ["--engine", "ray", "--shard-size", "64KiB", "--max-inflight", "2"]
    return [
        "build",
        str(samples),
        "--model",
        str(builds.model),
        "--out",
        str(builds.folder / "out"),
        *options,
        *servers,
    ]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_worker_is_killed_the_driver_interrupted_and_the_data_is_one_machines(
    builds: Builds, cluster: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = write_samples(builds.folder / "s.jsonl", SAMPLES)
    out, parts = builds.folder / "out", [builds.folder / f"out/.build/parts/{i}" for i in range(2)]
    killed: list[int] = []
    ticks: list[Tick] = []

    def disturb(tick: Tick) -> None:
        """Kill part 1's worker once it placed some samples; Ctrl-C once its next worker placed more."""
        ticks.append(tick)
        if len(killed) == 2 or not (work_folder(parts[1]) / "incarnation").exists():
            return
        done, lock = read_status(parts[1]).done, holder(work_folder(parts[1]) / "lock")
        started = int((work_folder(parts[1]) / "incarnation").read_text())
        if not killed and started == 0 and done >= 20 and "pid" in lock:
            os.kill(lock["pid"], signal.SIGKILL)
            killed.append(done)
            two.delay_s = 1.0  # so that the next worker is met amid its work, however slow this machine is
        elif killed and started == 1 and done >= killed[0] + 8:
            os.kill(os.getpid(), signal.SIGINT)
            killed.append(done)

    with builds.server(spool="spool-a") as one, builds.server(spool="spool-b") as two:
        one.delay_s, two.delay_s = 0.1, 0.4
        config = builds.config(
            "out", samples, one.url, two.url, engine="ray", max_inflight=4, interval_s=0.05, retries=9
        )
        report = build_on_ray(config, on_tick=disturb, on_text=builds.texts.append)
        assert len(killed) == 2, "the worker was killed and the run interrupted"
        assert not report.complete
        assert killed[1] <= report.saved < SAMPLES
        assert read_status(out).state == "INTERRUPTED"
        assert read_status(parts[1]).state == "INTERRUPTED", "the workers ended in order"
        assert int((work_folder(parts[1]) / "incarnation").read_text()) == 1, "Ray started a second worker"
        assert one.requests
        assert two.requests
        assert any("part 1 waits for a worker" in tick.note for tick in ticks)
        assert {tick.of for tick in ticks} == {SAMPLES}
        one.delay_s = two.delay_s = 0.0
        with pytest.raises(ConfigError, match="begun with --engine ray"):
            builds.run("out", samples, one.url)
        # server b is gone: its part goes on with the other; the command line this time
        monkeypatch.setattr(sys, "argv", ["eagle3-data", *command(builds, samples, one.url)])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code in (None, 0)
        assert f"{SAMPLES} planned = {SAMPLES} saved + 0 failed + 0 skipped" in capsys.readouterr().out
        builds.run("calm", samples, one.url)
        check_content(out, samples, one.spec)
    assert builds.shards("out") == builds.shards("calm")
    assert verify(out).problems == []
    merged, calm = Manifest.load(out), Manifest.load(builds.folder / "calm")
    assert (merged.state, merged.fingerprint, merged.plan) == ("complete", calm.fingerprint, calm.plan)
    assert merged.content_id == calm.content_id
    status = read_status(out)
    assert (status.state, status.done, status.nbytes) == ("COMPLETE", SAMPLES, merged.nbytes)
    history = read_tail(journal_path(out))
    assert all(later.done >= earlier.done for earlier, later in itertools.pairwise(history))
    assert all(later.nbytes >= earlier.nbytes for earlier, later in itertools.pairwise(history))


def test_without_ray(builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 3)
    monkeypatch.setitem(sys.modules, "ray", None)
    arguments = ["build", samples, "--model", builds.model, "--server", "http://127.0.0.1:9", "--engine", "ray"]
    monkeypatch.setattr(sys, "argv", ["eagle3-data", *map(str, arguments), "--out", str(builds.folder / "out")])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr().err
    assert "--engine ray needs Ray" in printed
    assert "eagle3-data[ray]" in printed
