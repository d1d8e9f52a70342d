"""What is sent when: the knee of a server, longest first, and a spool without space."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

import eagle3_data.builders.extract as extract
from eagle3_data.builders.knee import Knee
from eagle3_data.builders.ledger import Ledger
from eagle3_data.builders.samples.store import SampleStore
from eagle3_data.builders.sink import ShardSink
from eagle3_data.builders.spool import LocalSpool
from eagle3_data.cli.build import parse_inflight
from eagle3_data.errors import ConfigError
from eagle3_data.manifest import Manifest, PlanRow, ShardRow
from eagle3_data.shards.writer import OpenShard, Place
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples
from tests.replay import SPEC, Faults


class Lanes:
    """A server that works on `lanes` prompts of 100 tokens at once, the others wait; its time is simulated."""

    def __init__(self, lanes: int, knee: Knee) -> None:
        self.knee, self.now = knee, 0.0
        self.free = [0.0] * lanes
        self.ends: list[float] = []

    def work(self, requests: int, seconds: float = 1.0) -> None:
        for _ in range(requests):
            while len(self.ends) < self.knee.limit:
                start = max(self.now, heapq.heappop(self.free))
                heapq.heappush(self.free, start + seconds)
                heapq.heappush(self.ends, start + seconds)
            self.now = heapq.heappop(self.ends)
            self.knee.done(100, self.now)


@pytest.mark.parametrize(
    ("lanes", "low", "high"), [(1, 4, 4), (6, 8, 16), (16, 16, 32), (50, 32, 128), (300, 256, 512)]
)
def test_the_knee_is_found(lanes: int, low: int, high: int) -> None:
    knee = Knee()
    server = Lanes(lanes, knee)
    for _ in range(100):
        server.work(4 * knee.limit)
        if knee.found:
            break
    assert knee.found
    assert low <= knee.limit <= high


def test_the_next_step_is_tried_again_when_the_server_changes() -> None:
    knee = Knee()
    Lanes(8, knee).work(1000)
    assert knee.limit in (8, 16)
    later = Lanes(64, knee)
    later.now = 1e6
    later.work(60_000)
    assert knee.limit in (64, 128)


def test_max_inflight_is_auto_or_a_number() -> None:
    assert parse_inflight("auto") == "auto"
    assert parse_inflight("12") == 12
    for wrong in ("0", "many", "-1"):
        with pytest.raises(ConfigError, match="--max-inflight"):
            parse_inflight(wrong)


def test_auto_in_a_build(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 200)
    with builds.server() as server:
        assert builds.run("auto", samples, server.url, max_inflight="auto").saved == 200
        assert builds.run("one", samples, server.url, max_inflight=1).saved == 200
    assert builds.shards("auto") == builds.shards("one")


def test_longest_first_inside_a_window(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 90)
    tokens = [len(json.loads(line)["input_ids"]) for line in samples.read_text().splitlines()]
    with builds.server() as server:
        builds.run("out", samples, server.url, max_inflight=1)
        keys = [int(rid.split("-")[2]) for rid in server.requests]
    assert sorted(keys) == list(range(90))
    assert [tokens[key] for key in keys] == sorted(tokens, reverse=True), "90 samples are less than one window"


def test_a_full_spool_is_waited_for(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request goes out while the spool has no space; the run says so and goes on when there is."""
    looks: list[Path] = []
    real = LocalSpool.free_bytes

    def full_at_first(self: LocalSpool) -> int | None:
        looks.append(self.folder)
        return 1000 if len(looks) < 4 else real(self)

    monkeypatch.setattr("eagle3_data.builders.pool.PROBE_S", 0.2)
    monkeypatch.setattr(LocalSpool, "free_bytes", full_at_first)
    samples = write_samples(builds.folder / "s.jsonl", 20)
    with builds.server() as server:
        report = builds.run("out", samples, server.url, interval_s=0.02)
    assert (report.saved, report.retried) == (20, {})
    assert any("spool" in tick.note and "1,000 bytes free" in tick.note for tick in builds.ticks)


def test_a_server_without_space_costs_no_sample(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Error records for a full disk, more of them than `retries`: the samples wait and none is given up."""
    monkeypatch.setattr(extract, "BACKOFF_S", 0.01)
    samples = write_samples(builds.folder / "s.jsonl", 4)
    with builds.server(Faults(dump=dict.fromkeys(range(20), "error"))) as server:
        report = builds.run("out", samples, server.url, retries=1)
    assert (report.saved, report.failed, report.retried) == (4, {}, {"spool_full": 20})
    assert verify(builds.folder / "out").ok


class Counted(tuple[ShardRow, ...]):
    """Shards of a manifest that say how often they were looked through."""

    walks = 0

    def __iter__(self) -> Iterator[ShardRow]:
        Counted.walks += 1
        return super().__iter__()


def test_no_question_walks_through_all_shards_or_samples(tmp_path: Path) -> None:
    """A resume asks of each shard whether it is sealed, and each sample whether it was its shard's last."""
    rows = Counted(ShardRow(name=f"train-{n:06d}.tar", samples=1, tokens=1, nbytes=1, xxh3="") for n in range(50))
    plan = PlanRow(samples=60, tokens=60, nbytes=60, shards=60, shard_bytes=1)
    manifest = Manifest(dataset="d", run="r", capture=SPEC.to_dict(), samples={}, fingerprint={}, plan=plan)
    manifest = manifest.model_copy(update={"shards": rows})
    sink = ShardSink(tmp_path, [], cast(SampleStore, None), manifest, Ledger(tmp_path, 60, {}))
    before = Counted.walks
    assert [sink.is_sealed(f"train-{n:06d}.tar") for n in range(60)] == [n < 50 for n in range(60)]
    assert Counted.walks == before

    class Places(dict[str, Place]):
        walks = 0

        def __iter__(self) -> Iterator[str]:
            Places.walks += 1
            return super().__iter__()

    shard = OpenShard(tmp_path, "train-000050.tar", [Place(f"k{n}", "", 1, 0) for n in range(20)], SPEC)
    shard.places = Places(shard.places)
    for n in range(20):
        assert not shard.settled
        shard.give_up(f"k{n}")
    assert shard.settled
    assert Places.walks == 0
    shard.close()
