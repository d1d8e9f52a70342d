"""The order of fsync and rename around a seal: what a power cut may leave is what a resume can go on from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import eagle3_data.shards.writer as writer
from eagle3_data import durable
from tests.builders.conftest import Builds, write_samples
from tests.replay import Faults


def test_the_order_of_a_seal(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures durable, shard durable, index part durable, shard renamed, folder durable, then the manifest's row."""
    samples = write_samples(builds.folder / "s.jsonl", 30, lengths=(20, 60))
    out = builds.folder / "out"
    story: list[tuple[str, str]] = []
    real_fsync, real_replace = os.fsync, os.replace

    def name_of(fd: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), out)

    def fsync(fd: int) -> None:
        story.append(("fsync", name_of(fd)))
        real_fsync(fd)

    def replace(source: Path, target: Path) -> None:
        story.append(("rename", os.path.relpath(target, out)))
        real_replace(source, target)

    for module in (writer.os, durable.os):
        monkeypatch.setattr(module, "fsync", fsync)
        monkeypatch.setattr(module, "replace", replace)
    with builds.server(Faults(reply={3: "400"})) as server:
        report = builds.run("out", samples, server.url, max_inflight=1)
    assert report.failed == {"rejected": 1}
    shards = sorted(path.name for path in (out / "data").glob("*.tar"))
    assert len(shards) > 3
    for shard in shards:
        part = f"index/parts/{shard.removesuffix('.tar')}.parquet"
        steps = [
            ("fsync", f"data/.{shard}.tmp"),
            ("fsync", f"index/parts/.{Path(part).name}.tmp"),
            ("rename", part),
            ("fsync", "index/parts"),
            ("rename", f"data/{shard}"),
            ("fsync", "data"),
            ("fsync", ".manifest.json.tmp"),
            ("rename", "manifest.json"),
            ("fsync", "."),
        ]
        at = story.index(steps[0])
        assert ("fsync", "failures.jsonl") in story[max(0, at - 2) : at], "failures are durable before the shard"
        assert story[at : at + len(steps)] == steps
    assert story[-3:] == [("fsync", ".manifest.json.tmp"), ("rename", "manifest.json"), ("fsync", ".")], (
        "`complete` is the last word"
    )
