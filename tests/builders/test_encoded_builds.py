"""Whole builds with encodings over the replaying server: any order, kills, resumes, readers, training, verify."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch

from eagle3_data.builders.build import build
from eagle3_data.builders.reextract import reextract
from eagle3_data.capture import TOP_IDS, TOP_LOGPROBS
from eagle3_data.errors import ConfigError, ManifestMismatch
from eagle3_data.head import TargetHead
from eagle3_data.journal import Tick
from eagle3_data.manifest import Manifest
from eagle3_data.protocol import AUX, IDS, LAST
from eagle3_data.shards import ShardSet
from eagle3_data.verify import verify
from eagle3_data.verify_head import check_head
from tests.builders.conftest import Builds, write_samples
from tests.models import VOCAB, WIDTH
from tests.replay import SPEC, Faults, ReplayServer, states

WAYS = {
    "planes": {"encoding": "bf16-planes"},
    "fp8": {"encoding": "fp8"},
    "mixed": {"encoding": "fp8", "last_encoding": "bf16-planes"},
    "topk": {"encoding": "fp8", "last": "topk:8"},
}


def bf16_server(builds: Builds, faults: Faults | None = None, spool: str = "spool") -> ReplayServer:
    spec = replace(SPEC, model=str(builds.model), vocab_size=VOCAB, width=WIDTH, dtype="bfloat16")
    return ReplayServer(builds.folder / spool, spec, faults)


@pytest.mark.parametrize("way", WAYS)
def test_disturbed_builds_give_the_same_bytes(builds: Builds, way: str) -> None:
    """Invariant 6 with encodings: faults, retries, concurrency, a stop and a resume."""
    samples = write_samples(builds.folder / "s.jsonl", 40)
    with bf16_server(builds) as server:
        builds.run("calm", samples, server.url, max_inflight=1, **WAYS[way])
    wild = Faults(
        reply={1: "500", 9: "reset"}, dump={4: "none", 7: "truncated", 11: "late", 13: "flipped_byte"}, late_s=0.3
    )
    with bf16_server(builds, wild, "spool2") as server:
        stopped = stop_after(builds, "wild", samples, server.url, 12, **WAYS[way])
        before = {path: path.read_bytes() for path in (builds.folder / "wild/data").glob("*.tar")}
        report = builds.run("wild", samples, server.url, max_inflight=16, **WAYS[way])
    assert report.complete
    assert report.resumed == stopped
    assert report.sent - sum(report.retried.values()) == 40 - stopped
    assert all(path.read_bytes() == data for path, data in before.items())
    assert builds.shards("wild") == builds.shards("calm")
    assert verify(builds.folder / "wild").problems == []
    manifest = Manifest.load(builds.folder / "wild")
    assert manifest.capture["aux_encoding"] == WAYS[way]["encoding"]
    assert report.nbytes == manifest.nbytes


def stop_after(builds: Builds, out: str, samples: Path, url: str, count: int, **changes: str) -> int:
    """A run that is interrupted once `count` samples are done; how many it kept."""
    sent: list[int] = []

    def stop(tick: Tick) -> None:
        if tick.done >= count and not sent:
            sent.append(tick.done)
            os.kill(os.getpid(), signal.SIGINT)

    config = builds.config(out, samples, url, max_inflight=2, interval_s=0.01, **changes)
    report = build(config, on_tick=stop, on_text=builds.texts.append)
    return report.saved


DRIVER = """
import sys
from pathlib import Path
from tests.builders.conftest import Builds
builds = Builds(Path(sys.argv[1]), Path(sys.argv[2]))
report = builds.run("out", Path(sys.argv[3]), sys.argv[4], interval_s=0.05, encoding="bf16-planes")
print("COMPLETE" if report.complete else "STOPPED")
"""


@pytest.fixture
def slow_server(builds: Builds) -> Iterator[ReplayServer]:
    server = bf16_server(builds)
    server.delay_s = 0.02
    with server:
        yield server


def test_killed_builder_with_planes(builds: Builds, slow_server: ReplayServer) -> None:
    from tests.builders.test_kill import wait_for_progress

    samples = write_samples(builds.folder / "s.jsonl", 120)
    arguments = [str(builds.folder), str(builds.model), str(samples), slow_server.url]
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for_progress(builds.folder / "out", 30, process)
    process.kill()
    output, errors = process.communicate()
    assert b"Error" not in errors, errors.decode()
    report = builds.run("out", samples, slow_server.url, encoding="bf16-planes")
    assert report.complete
    assert report.resumed >= 30 or b"COMPLETE" in output
    builds.run("calm", samples, slow_server.url, encoding="bf16-planes")
    assert builds.shards("out") == builds.shards("calm")
    assert verify(builds.folder / "out").ok


def test_planes_are_the_servers_bytes_and_load(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", builds.folder / "arrow")
    samples = write_samples(builds.folder / "s.jsonl", 12)
    with bf16_server(builds) as server:
        builds.run("out", samples, server.url, encoding="bf16-planes")
        spec = server.spec
    for streaming in (False, True):
        data = datasets.load_dataset(
            "eagle3_data/custom", data_dir=str(builds.folder / "out"), split="train", streaming=streaming
        )
        rows = list(data)
        assert len(rows) == 12
        for row in rows:
            aux, last = states(row[IDS].tolist(), spec)
            assert row[AUX].view(torch.uint8).numpy().tobytes() == aux
            assert row[LAST].view(torch.uint8).numpy().tobytes() == last
    assert verify(builds.folder / "out").problems == []


def test_another_encoding_is_refused_by_name(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 6)
    with bf16_server(builds) as server:
        builds.run("out", samples, server.url, encoding="fp8")
        with pytest.raises(ManifestMismatch, match=r"capture\.aux_encoding = fp8, now it is bf16"):
            builds.run("out", samples, server.url)
        builds.run("top", samples, server.url, last="topk:4")
        with pytest.raises(ManifestMismatch, match=r"capture\.last = topk:4, now it is topk:5"):
            builds.run("top", samples, server.url, last="topk:5")
    with builds.server(spool="spool3") as server, pytest.raises(ConfigError, match="bf16-planes splits bfloat16"):
        builds.run("float", samples, server.url, encoding="bf16-planes")


def test_top_k_is_the_targets(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 8)
    head = TargetHead.load(str(builds.model), width=WIDTH)
    with bf16_server(builds) as server:
        builds.run("out", samples, server.url, last="topk:8")
        spec = server.spec
    data = ShardSet.open(builds.folder / "out")
    assert LAST not in data.columns
    for i in range(len(data)):
        sample = data.read(i)
        last = torch.frombuffer(bytearray(states(sample[IDS].tolist(), spec)[1]), dtype=torch.bfloat16)
        expected = head.logits(last.view(-1, WIDTH)).log_softmax(-1)
        torch.testing.assert_close(sample[TOP_LOGPROBS].float(), expected.topk(8).values, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            expected.gather(1, sample[TOP_IDS].long()), sample[TOP_LOGPROBS].float(), rtol=1e-3, atol=1e-3
        )


def test_verify_head_and_against(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replaying server's top-1 is a constant, so the head must disagree; its states come again bit-equal."""
    samples = write_samples(builds.folder / "s.jsonl", 8)
    with bf16_server(builds) as server:
        builds.run("out", samples, server.url)
        data = ShardSet.open(builds.folder / "out")
        same = reextract(data, server.url, 5, api_key=None)
        assert (same.samples, same.equal, same.worst, same.problems) == (5, 5, 0.0, [])
        assert list(server.spool.glob("e3d-*")) == []
        monkeypatch.setattr("tests.replay.states", _other)
        other = reextract(data, server.url, 5, api_key=None)
        assert other.equal == 0
        assert len(other.problems) >= 5
        assert "differs by" in other.problems[0]
    report = check_head(data, str(builds.model))
    assert report.samples == 8
    assert not report.ok
    assert report.worst_gap > report.rule.gap


def _other(ids: list[int], spec: object) -> tuple[bytes, bytes]:
    aux, last = states(ids, spec)  # type: ignore[arg-type]
    turned = torch.frombuffer(bytearray(aux), dtype=torch.bfloat16) * -1
    return turned.view(torch.uint8).numpy().tobytes(), last
