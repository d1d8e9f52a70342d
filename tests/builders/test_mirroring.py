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
