"""Pushing to a hub: what is sent, how often, in how many commits, and what may be removed here."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from eagle3_data.errors import ConfigError, ManifestMismatch, MirrorError
from eagle3_data.hub.mirror import parse_repository
from eagle3_data.hub.notes import deleted_shards
from eagle3_data.manifest import MANIFEST, Manifest
from eagle3_data.shards.layout import remote_path
from eagle3_data.verify import verify
from tests.builds import make_build
from tests.hub.conftest import REPO, opened, push, use
from tests.hub.stub import Fault, HubStub

pytestmark = pytest.mark.xdist_group("hub")
LENGTHS = tuple(range(3, 15))
"""Twelve samples, six shards."""


def shards_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "data").glob("*.tar"))}


def check_whole(hub: HubStub, folder_shards: dict[str, bytes]) -> None:
    """The mirror has every shard once, with its bytes, and manifest, index and card say so."""
    files = hub.files(REPO)
    assert {path for path in files if path.endswith(".tar")} == {remote_path(name) for name in folder_shards}
    for name, content in folder_shards.items():
        assert hub.content(REPO, remote_path(name)) == content
    manifest = Manifest.parse(hub.content(REPO, MANIFEST).decode(), "hub")
    assert [row.name for row in manifest.shards] == sorted(folder_shards)
    for row in manifest.shards:
        assert row.sha256 == hashlib.sha256(folder_shards[row.name]).hexdigest()
    index = pq.read_table(io.BytesIO(hub.content(REPO, "index/train.parquet")))
    keys = index.column("key").to_pylist()
    assert len(keys) == len(set(keys)) == manifest.saved


def test_a_push_and_its_repetition(hub: HubStub, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    report = push(folder)
    assert (report.complete, report.sent, report.there, report.commits) == (True, 6, 0, 1)
    check_whole(hub, shards_of(folder))
    assert Manifest.parse(hub.content(REPO, MANIFEST).decode(), "hub").state == "complete"
    again = push(folder)
    assert (again.complete, again.sent, again.there, again.commits) == (True, 0, 6, 0)
    assert len(hub.repository(REPO).commits) == 2, "a push with nothing new makes no commit"


def test_multipart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    with HubStub(tmp_path / "hub", part_size=4096) as hub:
        use(hub, monkeypatch)
        assert push(folder).complete
        check_whole(hub, shards_of(folder))
        assert len(hub.requests("PUT", "/part/")) > 6


def test_each_commit_is_a_whole_data_set(hub: HubStub, tmp_path: Path) -> None:
    """Card, index and manifest of a commit list exactly the shards in its tree; each has another version."""
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    assert push(folder, commit_shards=2, workers=1).commits == 3
    versions = set()
    for commit in hub.repository(REPO).commits[1:]:
        tars = sorted(path.rpartition("/")[2] for path in commit.tree if path.endswith(".tar"))
        manifest = Manifest.parse(commit.tree[MANIFEST].content.decode(), "hub")
        assert [row.name for row in manifest.shards] == tars
        assert manifest.state == ("complete" if len(tars) == 6 else "building")
        card = yaml.safe_load(commit.tree["README.md"].content.decode().split("---\n")[1])
        assert card["dataset_info"]["splits"][0]["num_examples"] == manifest.saved
        versions.add(card["dataset_info"]["version"])
    assert len(versions) == 3


def test_sent_and_not_committed_is_not_sent_again(hub: HubStub, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    hub.faults.append(Fault("POST", "/commit/", status=403))
    with pytest.raises(MirrorError, match="write access"):
        push(folder)
    sent = len(hub.requests("PUT", "/lfs/"))
    assert push(folder).complete
    tars = {entry.oid for path, entry in hub.files(REPO).items() if path.endswith(".tar")}
    assert [hub.store.received[oid] for oid in tars] == [hub.store.sizes[oid] for oid in tars]
    assert len(hub.requests("PUT", "/lfs/")) == sent == 7


def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub: HubStub, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    hub.faults.append(Fault("POST", "/commit/", status=504, after=True))
    report = push(folder)
    assert report.complete
    assert len(hub.repository(REPO).commits) == 2
    check_whole(hub, shards_of(folder))


def test_somebody_edits_the_repository_meanwhile(hub: HubStub, tmp_path: Path) -> None:
    """412: the push takes the new head as parent; another push's manifest is never overwritten."""
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    mirror_seen = []

    def edit(method: str, path: str) -> None:
        if "/commit/" in path and not mirror_seen:
            mirror_seen.append(path)
            change = {"kind": "small", "path": "NOTES.md", "content": b"hello"}
            hub.store.commit(REPO, None, "an edit", [change], False)

    hub.pace = edit
    assert push(folder).complete
    assert "NOTES.md" in hub.files(REPO)
    check_whole(hub, shards_of(folder))


def test_another_build_is_refused(hub: HubStub, tmp_path: Path) -> None:
    make_build(tmp_path / "a", LENGTHS)
    make_build(tmp_path / "b", LENGTHS[:4])
    push(tmp_path / "a")
    other = Manifest.load(tmp_path / "b").model_copy(update={"run": "other"})
    other.save(tmp_path / "b")
    before = len(hub.repository(REPO).commits)
    with pytest.raises(ManifestMismatch, match="another build"):
        push(tmp_path / "b")
    assert len(hub.repository(REPO).commits) == before


def test_a_damaged_shard_is_not_published(hub: HubStub, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    victim = folder / "data" / "train-000002.tar"
    content = bytearray(victim.read_bytes())
    content[3000] ^= 1
    victim.write_bytes(content)
    report = push(folder)
    assert (report.complete, report.published) == (False, 5)
    assert "train-000002.tar is not what was sealed" in report.problems[0]
    assert remote_path(victim.name) not in hub.files(REPO)


def test_local_shards_go_only_after_confirmation(hub: HubStub, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    before = shards_of(folder)
    missing: list[str] = []

    def watch(method: str, path: str) -> None:
        if "/paths-info/" not in path and not hub.requests("POST", "/paths-info/"):
            missing.extend(name for name in before if not (folder / "data" / name).exists())

    hub.pace = watch
    report = push(folder, delete_local=True)
    assert (report.complete, report.deleted, missing) == (True, 6, [])
    assert shards_of(folder) == {}
    assert set(deleted_shards(folder)) == set(before)
    check_whole(hub, before)
    checked = verify(folder)
    assert (checked.ok, checked.mirrored) == (True, 6)


@pytest.mark.parametrize("lie", ["sha256", "size", "absent"])
def test_a_mirror_that_does_not_confirm(hub: HubStub, tmp_path: Path, lie: str) -> None:
    """The commit went well, and the mirror then has other bytes, or none: the local shard stays."""
    from dataclasses import replace

    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    victim = remote_path("train-000001.tar")

    def spoil(method: str, path: str) -> None:
        if "/paths-info/" in path:
            tree = hub.repository(REPO).head.tree
            entry = tree.get(victim)
            if lie == "absent":
                tree.pop(victim, None)
            elif entry is not None:
                tree[victim] = replace(entry, oid="0" * 64) if lie == "sha256" else replace(entry, size=1)

    hub.pace = spoil
    report = push(folder, delete_local=True)
    assert (report.complete, report.deleted) == (False, 5)
    assert "train-000001.tar" in report.problems[0]
    assert list(shards_of(folder)) == ["train-000001.tar"]


def test_killed_between_commit_and_deletion(hub: HubStub, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    push(folder)
    report = push(folder, delete_local=True)
    assert (report.sent, report.deleted) == (0, 6)
    assert shards_of(folder) == {}


def test_xet_where_the_endpoint_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hf_xet")
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    with HubStub(tmp_path / "hub", xet_store=tmp_path / "cas") as hub:
        use(hub, monkeypatch)
        assert push(folder).complete
        assert hub.requests("GET", "/xet-write-token/")
        assert hub.requests("PUT", "/lfs/") == []
        files = hub.files(REPO)
        for name, content in shards_of(folder).items():
            assert files[remote_path(name)].oid == hashlib.sha256(content).hexdigest()


def test_lfs_where_it_has_not(hub: HubStub, tmp_path: Path) -> None:
    from huggingface_hub import constants

    make_build(tmp_path / "data", LENGTHS)
    assert push(tmp_path / "data").complete
    assert hub.requests("GET", "/xet-write-token/")
    assert len(hub.requests("PUT", "/lfs/")) == 7
    assert constants.HF_HUB_DISABLE_XET is False, "the setting is given back"


def test_folders_stay_below_the_hubs_limit() -> None:
    assert remote_path("train-000000.tar") == "data/train-000000.tar"
    assert remote_path("train-008999.tar") == "data/train-008999.tar"
    assert remote_path("train-009000.tar") == "data/001/train-009000.tar"
    places = [remote_path(f"train-{i:06d}.tar").rpartition("/")[0] for i in range(100_000)]
    assert max(places.count(folder) for folder in set(places)) + len(set(places)) < 10_000


def test_a_push_with_many_folders(hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import eagle3_data.hub.release as release
    import eagle3_data.shards.layout as layout

    monkeypatch.setattr(layout, "PER_FOLDER", 2)
    monkeypatch.setattr(release, "PER_FOLDER", 2)
    make_build(tmp_path / "data", LENGTHS)
    assert push(tmp_path / "data").complete
    assert "data/002/train-000005.tar" in hub.files(REPO)
    card = yaml.safe_load(hub.content(REPO, "README.md").decode().split("---\n")[1])
    assert card["configs"][0]["data_files"][0]["path"] == ["data/train-*.tar", "data/*/train-*.tar"]
    assert push(tmp_path / "data").sent == 0


def test_the_license_stays(hub: HubStub, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    push(folder, license="cc-by-4.0", commit_shards=3)
    assert push(folder).commits == 0
    assert "license: cc-by-4.0" in hub.content(REPO, "README.md").decode()


def test_names_that_are_no_mirror() -> None:
    assert parse_repository("org/name") == ("org/name", None)
    assert parse_repository("hf://datasets/org/name@v1") == ("org/name", "v1")
    assert parse_repository("s3://bucket/name") is None
    for wrong in ("name", "hf://models/org/name", "/some/folder/here", "s3://key:secret@bucket/x"):
        with pytest.raises(ConfigError) as caught:
            parse_repository(wrong)
        assert "secret" not in str(caught.value)


def test_torn_notes(hub: HubStub, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    push(folder)
    notes = folder / ".build" / "push.jsonl"
    notes.write_text(notes.read_text() + '{"event": "sent", "na')
    assert push(folder).complete
    events = [json.loads(line)["event"] for line in notes.read_text().splitlines() if line.endswith("}")]
    assert events.count("hashed") == events.count("published") == 6


def test_mirrors_that_are_not_there(hub: HubStub) -> None:
    with pytest.raises(MirrorError, match="check the name"):
        opened("org/nowhere", create=False)
