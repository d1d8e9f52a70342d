"""A server that comes back as a new process: checked again, recorded, and no dump of it is taken before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import eagle3_data.builders.pool as pool
from eagle3_data.builders.build import build
from eagle3_data.errors import BuildFailed
from eagle3_data.journal import Tick
from eagle3_data.manifest import Manifest
from eagle3_data.protocol import instance_marker
from eagle3_data.shards import ShardSet
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples
from tests.builders.test_build import check_content
from tests.replay import ReplayServer


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "PROBE_S", 0.05)


def start_again(server: ReplayServer, **info: Any) -> None:
    """Between two requests, so that no connection breaks: the port is the same, the process another."""
    server.instance += "again"
    instance_marker(server.spool, server.instance).touch()
    server.info_changes.update(info)


def run_and_restart(builds: Builds, samples: Path, server: ReplayServer, at: int, **info: Any) -> None:
    """A build during which the server is started again, once `at` samples are done."""
    done: list[int] = []

    def on_tick(tick: Tick) -> None:
        builds.ticks.append(tick)
        if not done and tick.done >= at:
            done.append(tick.done)
            start_again(server, **info)

    server.delay_s = 0.02
    config = builds.config("out", samples, server.url, interval_s=0.01, max_inflight=2, server_timeout_s=1.0)
    build(config, on_tick=on_tick, on_text=builds.texts.append)
    assert done


def test_a_restart_that_nobody_noticed_is_recorded(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 60)
    with builds.server() as server:
        first = server.instance
        run_and_restart(builds, samples, server, 20, sglang_version="replay-2")
        check_content(builds.folder / "out", samples, server.spec)
    manifest = Manifest.load(builds.folder / "out")
    assert [row.instance for row in manifest.servers] == [first, f"{first}again"]
    assert [row.sglang_version for row in manifest.servers] == ["replay", "replay-2"]
    assert manifest.saved == 60
    assert verify(builds.folder / "out").ok
    assert (
        f"{first}again"[:8] in (builds.folder / "out/README.md").read_text()
        or "replay-2" in (builds.folder / "out/README.md").read_text()
    )


def test_a_restart_with_another_model_gives_no_sample(builds: Builds) -> None:
    """Same port, same widths, other weights: nothing about a dump's form would show it."""
    samples = write_samples(builds.folder / "s.jsonl", 60)
    with builds.server() as server:
        first = server.instance
        with pytest.raises(BuildFailed, match=r"no server alive .*serves someone/Else-7B"):
            run_and_restart(builds, samples, server, 20, model_path="someone/Else-7B")
        assert any("serves someone/Else-7B" in tick.note for tick in builds.ticks), "status says why it waits"
        asked = len(server.requests)
        assert [row.instance for row in Manifest.load(builds.folder / "out").servers] == [first]
        del server.info_changes["model_path"]
        report = builds.run("out", samples, server.url)
        assert report.complete
        assert 20 <= report.resumed < 60
        assert report.resumed + report.sent == 60
        assert asked < 60
        check_content(builds.folder / "out", samples, server.spec)


def test_a_server_that_died_is_used_again(builds: Builds) -> None:
    """Two servers; one dies, the other goes on; the first comes back at its port as a new process and gets work."""
    samples = write_samples(builds.folder / "s.jsonl", 300, lengths=(4, 20))
    first, again = builds.server(spool="a"), builds.server(spool="a")
    began: list[str] = []
    up: list[int] = []

    def on_tick(tick: Tick) -> None:
        up.append(tick.servers_up)
        if not began and tick.done >= 30:
            first.__exit__()
            began.append("died")
        elif began == ["died"] and tick.servers_up == 1:
            again.__enter__()
            began.append("came back")

    with builds.server(spool="b") as other:
        other.delay_s = again.delay_s = first.delay_s = 0.03
        first.__enter__()
        again.port = first.port
        config = builds.config("out", samples, first.url, other.url, interval_s=0.01, max_inflight=2)
        report = build(config, on_tick=on_tick, on_text=builds.texts.append)
        assert began == ["died", "came back"]
        again.__exit__()
    assert report.complete
    assert report.saved == 300
    assert (min(up), up[-1]) == (1, 2)
    assert first.requests
    assert again.requests
    assert report.retried.keys() <= {"connection"}
    instances = {row.instance for row in Manifest.load(builds.folder / "out").servers}
    assert instances == {first.instance, other.instance, again.instance}
    check_content(builds.folder / "out", samples, other.spec)


def test_a_resume_counts_from_what_is_there(builds: Builds) -> None:
    """Bytes, tokens and samples never go down, not even from a killed run's last line to the next run's first."""
    from eagle3_data.journal import journal_path, read_tail

    samples = write_samples(builds.folder / "s.jsonl", 90, lengths=(20, 60))

    class Killed(BaseException):
        pass

    def kill(tick: Tick) -> None:
        if tick.done >= 40:
            raise Killed

    with builds.server() as server:
        server.delay_s = 0.01
        config = builds.config("out", samples, server.url, interval_s=0.01, max_inflight=4)
        with pytest.raises(Killed):
            build(config, on_tick=kill, on_text=builds.texts.append)
        open_notes = list((builds.folder / "out/data").glob(".*.placed"))
        assert open_notes, "some shards were open"
        assert builds.run("out", samples, server.url).complete
    ticks = read_tail(journal_path(builds.folder / "out"))
    starts = [i for i, tick in enumerate(ticks) if tick.event == "start"]
    assert len(starts) == 2
    before, after = ticks[starts[1] - 1], ticks[starts[1]]
    assert (after.done, after.tokens, after.nbytes) == (before.done, before.tokens, before.nbytes)
    assert after.done >= 40
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(ShardSet.open(builds.folder / "out")) == len(rows)
