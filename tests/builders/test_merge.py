"""`--shards i/n` and `merge`: what several machines made is what one would have made."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from eagle3_data.builders.merge import merge
from eagle3_data.cli.build import parse_part
from eagle3_data.errors import ConfigError, ManifestMismatch, ShardCorrupt
from eagle3_data.manifest import Manifest
from eagle3_data.shards import ShardSet
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples
from tests.builders.test_build import check_content
from tests.replay import Faults


def test_three_parts_are_the_whole(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 60)
    folders = [builds.folder / f"part-{i}" for i in range(3)]
    with builds.server() as server:
        whole = builds.run("whole", samples, server.url)
        before = len(server.requests)
        for i in range(3):
            assert builds.run(f"part-{i}", samples, server.url, part=(i, 3)).complete
        assert len(server.requests) - before == 60, "every sample was asked for once"
        spec = server.spec
    for _ in range(2):  # repeating it is safe
        merged = merge(folders[::-1], builds.folder / "out")
    assert builds.shards("out") == builds.shards("whole")
    assert verify(builds.folder / "out").problems == []
    assert (merged.plan, merged.saved, merged.state) == (
        Manifest.load(whole.out).plan,
        60,
        "complete",
    )
    assert ShardSet.open(builds.folder / "out").keys == ShardSet.open(whole.out).keys
    assert merged.fingerprint == Manifest.load(whole.out).fingerprint
    check_content(builds.folder / "out", samples, spec)


def test_failed_samples_of_parts_add_up_and_retries_never_meet(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 60)
    folders = [builds.folder / f"part-{i}" for i in range(2)]
    for i in range(2):
        with builds.server(Faults(reply={2: "400"}), spool=f"spool-{i}") as server:
            assert builds.run(f"part-{i}", samples, server.url, part=(i, 2)).failed == {"rejected": 1}
    merged = merge(folders, builds.folder / "out")
    assert (merged.saved, merged.failed) == (58, {"rejected": 2})
    rows = [json.loads(line) for line in (builds.folder / "out/failures.jsonl").read_text().splitlines()]
    assert len({row["key"] for row in rows}) == 2
    assert verify(builds.folder / "out").ok
    with builds.server(spool="again") as server:
        for i in range(2):
            assert builds.run(f"part-{i}", samples, server.url, part=(i, 2), retry_failed=True).saved == (
                Manifest.load(folders[i]).plan.samples
            )
        merged = merge(folders, builds.folder / "out2")
        assert (merged.saved, merged.failed) == (60, {})
        check_content(builds.folder / "out2", samples, server.spec)


def test_more_parts_than_shards_and_parts_without_a_sample(builds: Builds) -> None:
    """A part may have nothing to do, and all of a part's samples may fail: each ends, and they merge."""
    samples = write_samples(builds.folder / "s.jsonl", 10)
    folders = [builds.folder / f"part-{i}" for i in range(3)]
    with builds.server() as server:
        for i in range(3):
            report = builds.run(f"part-{i}", samples, server.url, part=(i, 3), shard_bytes=4 << 20)
            assert (report.complete, report.saved) == (True, 0 if i else 10)
        spec = server.spec
    assert (merge(folders, builds.folder / "out").saved, verify(builds.folder / "out").problems) == (10, [])
    check_content(builds.folder / "out", samples, spec)
    assert verify(folders[1]).ok
    rejected = [builds.folder / f"rejected-{i}" for i in range(2)]
    with builds.server(Faults(reply=dict.fromkeys(range(10), "400")), spool="b") as server:
        for i, folder in enumerate(rejected):
            change = {"part": (i, 2), "shard_bytes": 4 << 20, "max_failure_share": 1.0}
            report = builds.run(folder.name, samples, server.url, **change)
            assert (report.complete, report.failed) == (True, {} if i else {"rejected": 10})
            assert verify(folder).problems == []
    merged = merge(rejected, builds.folder / "none")
    assert (merged.saved, merged.failed, verify(builds.folder / "none").problems) == (0, {"rejected": 10}, [])
    with builds.server(spool="c") as server:
        again = builds.run("rejected-0", samples, server.url, part=(0, 2), shard_bytes=4 << 20, retry_failed=True)
    assert (again.saved, again.failed, verify(rejected[0]).problems) == (10, {}, [])


def test_parts_that_are_not_one_build_are_refused(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 30)
    with builds.server() as server:
        for i in range(2):
            builds.run(f"part-{i}", samples, server.url, part=(i, 2))
        builds.run("other", samples, server.url, part=(1, 2), last="none")
        builds.run("whole", samples, server.url)
        with pytest.raises(ManifestMismatch, match="shards"):
            builds.run("part-0", samples, server.url, part=(1, 2))
    zero, one, other, whole = (builds.folder / name for name in ("part-0", "part-1", "other", "whole"))
    for parts, error, text in (
        ([zero], ConfigError, "parts missing: 1/2"),
        ([zero, zero], ConfigError, "are both part 0/2"),
        ([zero, other], ManifestMismatch, r"capture\.last"),
        ([zero, whole], ConfigError, "is a whole build"),
        ([], ConfigError, "no part"),
    ):
        with pytest.raises(error, match=text):
            merge(parts, builds.folder / "out")
    Manifest.load(one).model_copy(update={"state": "building"}).save(one)
    with pytest.raises(ConfigError, match="part-1 is not finished"):
        merge([zero, one], builds.folder / "out")


def test_a_cut_shard_is_not_merged(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, out = write_samples(builds.folder / "s.jsonl", 30), builds.folder / "out"
    folders = [builds.folder / f"part-{i}" for i in range(2)]
    with builds.server() as server:
        for i in range(2):
            builds.run(f"part-{i}", samples, server.url, part=(i, 2))
    shard = min((folders[0] / "data").glob("*.tar"))
    whole = shard.read_bytes()
    words = rf"{shard.name} has {len(whole) // 2:,} bytes, its part's manifest says {len(whole):,}"
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ShardCorrupt, match=words):
        merge(folders, out)
    assert [path.name for path in (out / "data").iterdir() if shard.name in path.name] == []
    shard.write_bytes(whole)
    merge(folders, out)
    shard.write_bytes(whole[: len(whole) // 2])  # the merged folder's, too: it is linked
    with pytest.raises(ShardCorrupt, match=words):
        merge(folders, out)
    shutil.rmtree(out)

    def no_link(*paths: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(ShardCorrupt, match="does not give its checksum"):
        merge(folders, out)
    assert [path.name for path in (out / "data").iterdir() if shard.name in path.name] == []


def test_shards_behind_symbolic_links_are_merged(builds: Builds) -> None:
    """As when a part's disk was full and some shards were moved to another."""
    samples, out = write_samples(builds.folder / "s.jsonl", 30), builds.folder / "deeper" / "out"
    folders, disk = [builds.folder / f"part-{i}" for i in range(2)], builds.folder / "disk"
    with builds.server() as server:
        builds.run("whole", samples, server.url)
        for i in range(2):
            builds.run(f"part-{i}", samples, server.url, part=(i, 2))
    disk.mkdir()
    for shard in sorted((folders[0] / "data").glob("*.tar")):
        shard.rename(disk / shard.name)
        shard.symlink_to(os.path.relpath(disk / shard.name, shard.parent))
    for _ in range(2):
        merge(folders, out)
        assert verify(out).problems == []
    assert builds.shards("deeper/out") == builds.shards("whole")
    assert not any(path.is_symlink() for path in (out / "data").iterdir())
    (disk / shard.name).unlink()
    shutil.rmtree(out)
    with pytest.raises(ShardCorrupt, match=f"{shard.name} is in its part's manifest and not on disk"):
        merge(folders, out)


def test_shards_option() -> None:
    assert parse_part("2/8") == (2, 8)
    assert parse_part(None) is None
    with pytest.raises(ConfigError, match="i/n"):
        parse_part("3")
