"""A build that pushes as it goes, on a disk smaller than its data set."""

from __future__ import annotations

from eagle3_data.hub.check import check_mirror
from eagle3_data.hub.mirror import make_mirror
from eagle3_data.patience import Patience
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples

SHARD = 64 << 10


def test_build_with_a_mirror_and_little_scratch(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 60)
    url, scratch = f"file://{builds.folder}/mirror", 3 * SHARD
    with builds.server() as server:
        report = builds.run(
            "out", samples, server.url, mirror=url, delete_local=True, scratch_bytes=scratch, interval_s=0.05
        )
        builds.run("calm", samples, server.url)
    assert report.complete
    calm = builds.shards("calm")
    assert sum(map(len, calm.values())) > 2 * scratch, "the data set is larger than the scratch"
    assert builds.shards("out") == {}
    mirror = make_mirror(url, Patience())
    checked = check_mirror(mirror)
    assert (checked.problems, checked.samples, checked.complete) == ([], 60, True)
    pushed = {path.name: path.read_bytes() for path in (builds.folder / "mirror" / "data").glob("*.tar")}
    assert pushed == calm
    assert verify(builds.folder / "out").mirrored == len(calm)
