"""A build that pushes as it goes, on a disk smaller than its data set."""

from __future__ import annotations

import pytest

from eagle3_data.hub.check import check_mirror
from eagle3_data.patience import Patience
from eagle3_data.shards import open_samples
from eagle3_data.shards.layout import remote_path
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples
from tests.hub.conftest import REPO, hub, opened
from tests.hub.stub import HubStub
from tests.replay import Faults

__all__ = ["hub"]
SHARD = 64 << 10


@pytest.mark.parametrize("target", ["folder", "hub"])
def test_build_with_a_mirror_and_little_scratch(
    builds: Builds,
    hub: HubStub,
    target: str,
) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 60)
    where, scratch = f"file://{builds.folder}/mirror" if target == "folder" else REPO, 3 * SHARD
    with builds.server() as server:
        report = builds.run(
            "out", samples, server.url, mirror=where, delete_local=True, scratch_bytes=scratch, interval_s=0.05
        )
        builds.run("calm", samples, server.url)
    assert report.complete
    calm = builds.shards("calm")
    assert sum(map(len, calm.values())) > 2 * scratch, "the data set is larger than the scratch"
    assert builds.shards("out") == {}
    checked = check_mirror(opened(where, create=False, patience=Patience()))
    assert (checked.problems, checked.samples, checked.complete) == ([], 60, True)
    if target == "folder":
        pushed = {path.name: path.read_bytes() for path in (builds.folder / "mirror" / "data").glob("*.tar")}
    else:
        pushed = {name: hub.content(REPO, remote_path(name)) for name in calm}
        assert 2 <= len(hub.repository(REPO).commits) <= 1 + len(calm)
    assert pushed == calm
    assert verify(builds.folder / "out").mirrored == len(calm)
    here, there = open_samples(builds.folder / "calm"), open_samples(builds.folder / "out")
    for i in range(0, 60, 7):
        mine, theirs = here.read(i), there.read(i)
        assert all(mine[name].equal(theirs[name]) for name in here.columns)


@pytest.mark.timeout(90)
def test_shards_without_a_sample_give_their_scratch_back(builds: Builds) -> None:
    """Two shards fit in the scratch and four end empty; nothing of those goes to the mirror, so nobody removes them."""
    samples = write_samples(builds.folder / "s.jsonl", 8, lengths=(50, 50))
    changes = {
        "shard_bytes": 28 << 10,  # one sample each
        "mirror": f"file://{builds.folder}/mirror",
        "delete_local": True,
        "scratch_bytes": 60_000,
        "max_failure_share": 1.0,
        "max_inflight": 1,
        "interval_s": 0.05,
    }
    with builds.server(Faults(reply=dict.fromkeys(range(4), "400"))) as server:
        report = builds.run("out", samples, server.url, **changes)
        assert (report.complete, report.saved, report.failed) == (True, 4, {"rejected": 4})
        again = builds.run("out", samples, server.url, **changes)
    assert (again.complete, again.sent, again.failed) == (True, 0, {"rejected": 4}), "they take scratch again"
    assert len(list((builds.folder / "mirror/data").glob("*.tar"))) == 4
    assert verify(builds.folder / "out").ok
