"""Pull, check, and mirrors that are no hub: S3 (moto's server), a folder, memory."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from eagle3_data.errors import BuildFailed, ConfigError, ManifestMismatch, MirrorError, ShardCorrupt
from eagle3_data.hub.check import check_mirror
from eagle3_data.hub.mirror import make_mirror
from eagle3_data.hub.pull import Pull, PullReport, check_name
from eagle3_data.manifest import MANIFEST, Manifest
from eagle3_data.patience import Patience
from eagle3_data.shards import ShardSet, layout
from eagle3_data.shards.cache import CacheConfig
from eagle3_data.shards.layout import remote_path
from eagle3_data.shards.remote import RemoteShardSet
from eagle3_data.verify import verify
from tests.builds import make_build
from tests.hub.conftest import QUICK, REPO, opened, push
from tests.hub.stub import Fault, HubStub
from tests.hub.test_push import LENGTHS, check_whole, shards_of

pytestmark = pytest.mark.xdist_group("hub")


def pull(folder: Path, target: str = REPO, **settings: int) -> PullReport:
    return Pull(opened(target, create=False), folder, workers=2, **settings).run()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of moto's S3 server, reached as any S3 is: by the environment."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
    type(filesystem).clear_instance_cache()
    bucket = f"mirrors-{uuid.uuid4().hex[:8]}"  # moto's buckets outlive its server
    filesystem.mkdir(bucket)
    yield f"s3://{bucket}/states"
    type(filesystem).clear_instance_cache()
    server.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/mirror"
    if request.param == "memory":
        return f"memory://{tmp_path.name}-{os.getpid()}/mirror"
    return str(request.getfixturevalue("s3"))


def test_any_url(url: str, tmp_path: Path) -> None:
    """Push, repeat, check, pull, then push with removal: the store tells no sha256, so the bytes are read back."""
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    before = shards_of(folder)
    assert push(folder, url, commit_shards=2).complete
    again = push(folder, url)
    assert (again.sent, again.there, again.commits) == (0, 6, 0)
    report = check_mirror(opened(url, create=False))
    assert (report.problems, report.shards, report.read_bytes) == ([], 6, sum(map(len, before.values())))
    assert pull(tmp_path / "copy", url).fetched == 6
    assert shards_of(tmp_path / "copy") == before
    assert verify(tmp_path / "copy").ok
    removed = push(folder, url, delete_local=True)
    assert (removed.deleted, shards_of(folder)) == (6, {})


def test_damage_in_a_store(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    push(folder, url)
    filesystem, root = fsspec.core.url_to_fs(url)
    place = f"{root}/{remote_path('train-000003.tar')}"
    content = bytearray(filesystem.cat_file(place))
    content[2000] ^= 1
    filesystem.pipe_file(place, bytes(content))
    assert [text.split(":")[0] for text in check_mirror(opened(url, create=False)).problems] == ["train-000003.tar"]
    report = push(folder, url, delete_local=True)
    assert (report.complete, report.deleted) == (False, 5)
    assert list(shards_of(folder)) == ["train-000003.tar"]


def test_pull_from_a_hub(hub: HubStub, tmp_path: Path) -> None:
    folder, copy = tmp_path / "data", tmp_path / "copy"
    make_build(folder, LENGTHS)
    push(folder)
    report = pull(copy)
    assert (report.shards, report.fetched, report.there) == (6, 6, 0)
    assert shards_of(copy) == shards_of(folder)
    assert verify(copy).ok
    assert ShardSet.open(copy).keys == ShardSet.open(folder).keys
    hub.seen.clear()
    assert pull(copy).there == 6
    assert hub.requests("GET", r"\.tar") == []


def test_pull_goes_on_at_the_byte(hub: HubStub, tmp_path: Path) -> None:
    folder, copy = tmp_path / "data", tmp_path / "copy"
    make_build(folder, [200, 200], per_shard=1)
    push(folder)
    hub.faults.append(Fault("GET", r"train-000001\.tar", status=404, skip=3, times=100))
    with pytest.raises(MirrorError):
        pull(copy, piece_bytes=16 << 10)
    assert not (copy / MANIFEST).exists(), "not a build before it is whole"
    assert (copy / "data" / ".train-000001.tar.pull").stat().st_size == 3 * (16 << 10)
    hub.faults.clear()
    hub.seen.clear()
    report = pull(copy, piece_bytes=16 << 10)
    ranges = [seen.range for seen in hub.requests("GET", r"train-000001\.tar")]
    assert ranges[0].startswith(f"bytes={3 * (16 << 10)}-")
    assert report.shards == 2
    assert shards_of(copy) == shards_of(folder)


def test_pull_through_resets_and_refusals(hub: HubStub, tmp_path: Path) -> None:
    folder, copy = tmp_path / "data", tmp_path / "copy"
    make_build(folder, [200, 200], per_shard=1)
    push(folder)
    hub.faults += [
        Fault("GET", r"\.tar", status=429, headers={"Retry-After": "0"}),
        Fault("GET", r"\.tar", status=503, skip=1),
        Fault("GET", r"\.tar", cut=1000, skip=1),
        Fault("GET", r"\.tar", status=0),
    ]
    pull(copy, piece_bytes=16 << 10)
    assert all(fault.times == 0 for fault in hub.faults)
    assert shards_of(copy) == shards_of(folder)


def test_pull_refuses_wrong_bytes(hub: HubStub, tmp_path: Path) -> None:
    folder, copy = tmp_path / "data", tmp_path / "copy"
    make_build(folder, LENGTHS)
    push(folder)
    blob = hub.store.blob(hub.files(REPO)[remote_path("train-000004.tar")].oid)
    content = bytearray(blob.read_bytes())
    content[1000] ^= 1
    blob.write_bytes(content)
    with pytest.raises(ShardCorrupt, match=r"train-000004\.tar has checksum"):
        pull(copy)
    assert not (copy / "data" / "train-000004.tar").exists()
    assert not (copy / MANIFEST).exists()


def test_pull_brings_back_what_was_removed(hub: HubStub, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    before = shards_of(folder)
    push(folder, delete_local=True)
    assert pull(folder).fetched == 6
    assert shards_of(folder) == before
    checked = verify(folder)
    assert (checked.ok, checked.mirrored, checked.samples) == (True, 0, len(LENGTHS))


def test_pull_never_mixes_builds(hub: HubStub, tmp_path: Path) -> None:
    make_build(tmp_path / "a", LENGTHS)
    push(tmp_path / "a")
    make_build(tmp_path / "b", LENGTHS)
    Manifest.load(tmp_path / "b").model_copy(update={"run": "other"}).save(tmp_path / "b")
    with pytest.raises(ManifestMismatch):
        pull(tmp_path / "b")


def test_pull_without_space(hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    from collections import namedtuple

    make_build(tmp_path / "a", LENGTHS)
    push(tmp_path / "a")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(BuildFailed, match="free"):
        pull(tmp_path / "b")


@pytest.mark.parametrize("name", ["../x.tar", "/etc/x.tar", "a/b.tar", ".hidden.tar", "x.tar.gz", "x", "..tar"])
def test_a_mirror_cannot_name_files_elsewhere(name: str) -> None:
    with pytest.raises(ShardCorrupt):
        check_name(name, "hub")


def test_check_downloads_no_tensor(hub: HubStub, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    push(folder)
    hub.seen.clear()
    report = check_mirror(opened(create=False))
    assert (report.ok, report.read_bytes, report.complete) == (True, 0, True)
    assert hub.requests("GET", r"\.tar") == []


@pytest.mark.parametrize("damage", ["lost", "other", "short", "foreign", "index"])
def test_check_finds(damage: str, hub: HubStub, tmp_path: Path) -> None:
    from dataclasses import replace

    folder, path = tmp_path / "data", remote_path("train-000002.tar")
    make_build(folder, LENGTHS)
    push(folder)
    tree = hub.repository(REPO).head.tree
    if damage == "lost":
        del tree[path]
    elif damage == "other":
        tree[path] = replace(tree[path], oid="0" * 64)
    elif damage == "short":
        tree[path] = replace(tree[path], size=tree[path].size - 512)
    elif damage == "foreign":
        tree["data/train-000099.tar"] = tree[path]
    else:
        del tree["index/train.parquet"]
    problems = check_mirror(opened(create=False)).problems
    expected = {"foreign": "train-000099.tar", "index": "index/train.parquet"}.get(damage, "train-000002.tar")
    assert len(problems) == 1
    assert expected in problems[0]


def test_revisions(hub: HubStub, tmp_path: Path) -> None:
    """A reader may name a commit: the data set as it was then."""
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    push(folder, commit_shards=2, workers=1)
    early = hub.repository(REPO).commits[1]
    mirror = make_mirror(REPO, QUICK, revision=early.oid)
    mirror.open(create=False)
    assert check_mirror(mirror).shards == 2
    with pytest.raises(ConfigError, match="no revisions"):
        make_mirror(f"file://{tmp_path}", Patience(), revision="main")


def test_what_was_pushed_is_whole(hub: HubStub, tmp_path: Path) -> None:
    """The check of other tests, against itself: it must notice a missing shard."""
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    push(folder)
    shards = shards_of(folder)
    check_whole(hub, shards)
    with pytest.raises(AssertionError):
        check_whole(hub, {**shards, "train-000099.tar": b""})


@pytest.mark.parametrize("cached", [False, True])
def test_shards_in_further_folders_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """Shards from the ten-thousandth on lie elsewhere in a mirror; here from the third on."""
    monkeypatch.setattr(layout, "PER_FOLDER", 2)
    folder, target = tmp_path / "data", f"file://{tmp_path / 'mirror'}"
    make_build(folder, LENGTHS)
    push(folder, target)
    assert (tmp_path / "mirror" / "data" / "001" / "train-000003.tar").exists()
    cache = CacheConfig(tmp_path / "cache", 1 << 30) if cached else None
    near, far = ShardSet.open(folder), RemoteShardSet.open(target, cache=cache)
    for i in range(len(near)):
        mine, theirs = near.read(i), far.read(i)
        assert all(torch.equal(mine[name], theirs[name]) for name in near.columns)
