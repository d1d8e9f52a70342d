"""A build whose shards `push --delete-local` removed: everything that reads it goes on, through the mirror."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from eagle3_data.cli.train import open_samples as open_for_training
from eagle3_data.errors import ShardCorrupt
from eagle3_data.hub.notes import deleted_shards
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from eagle3_data.shards import ShardSet, open_samples
from eagle3_data.shards.layout import remote_path
from tests.builds import FakeDump, make_build
from tests.hub.conftest import REPO, push
from tests.hub.stub import HubStub
from tests.hub.test_mirrors import pull
from tests.hub.test_push import LENGTHS

pytestmark = pytest.mark.xdist_group("hub")


@pytest.fixture
def removed(hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[FakeDump]]:
    """Twelve samples in six shards, all of them in the hub alone."""
    monkeypatch.setattr("eagle3_data.loading.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    monkeypatch.delenv("EAGLE3_DATA_SHARD_CACHE", raising=False)
    dumps = make_build(tmp_path / "data", LENGTHS)
    assert push(tmp_path / "data", delete_local=True).deleted == 6
    hub.seen.clear()
    return tmp_path / "data", dumps


def same(row: dict[str, Any], dump: FakeDump) -> bool:
    wanted = {AUX: dump.aux, LAST: dump.last, IDS: dump.ids, MASK: dump.mask}
    return all(torch.equal(row[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_load_dataset(
    removed: tuple[Path, list[FakeDump]], hub: HubStub, tmp_path: Path, streaming: bool, cached: bool
) -> None:
    folder, dumps = removed
    options = {"shard_cache": str(tmp_path / "cache"), "shard_cache_size": "1GB"} if cached else {}
    data = datasets.load_dataset(
        "eagle3_data/custom", data_dir=str(folder), split="train", streaming=streaming, **options
    )
    for _ in range(2):
        assert all(same(row, dump) for row, dump in zip(data, dumps, strict=True))
    whole = {seen.path for seen in hub.requests("GET", r"\.tar") if seen.range.startswith("bytes=0-")}
    assert len(whole) == (6 if cached else 0)
    assert len(list((tmp_path / "cache").glob("*.tar"))) == (6 if cached else 0)


def test_what_is_here_is_read_here(removed: tuple[Path, list[FakeDump]], hub: HubStub, tmp_path: Path) -> None:
    folder, dumps = removed
    pull(tmp_path / "copy")
    for name in ("train-000001.tar", "train-000004.tar"):
        shutil.copy(tmp_path / "copy" / "data" / name, folder / "data" / name)
    hub.seen.clear()
    data = open_samples(folder)
    assert isinstance(data, ShardSet)
    assert data.check_far() == f"4 of 6 shards are read from hf://datasets/{REPO}"
    for table in (data, pickle.loads(pickle.dumps(data))):
        assert all(same(table.read(i), dump) for i, dump in enumerate(dumps))
        for i, dump in enumerate(dumps):
            out = {AUX: torch.empty_like(dump.aux)}
            table.read_into(i, out)
            assert torch.equal(out[AUX], dump.aux)
    assert hub.requests("GET", r"train-00000[0235]\.tar")
    assert not hub.requests("GET", r"train-00000[14]\.tar")


@pytest.mark.parametrize("target", ["hub", "folder"])
def test_removed_while_it_is_read(hub: HubStub, tmp_path: Path, target: str) -> None:
    """A push beside a reader: what it had opened goes on in the mirror."""
    folder, where = tmp_path / "data", REPO if target == "hub" else f"file://{tmp_path / 'mirror'}"
    dumps = make_build(folder, LENGTHS)
    data = open_samples(folder)
    assert same(data.read(0), dumps[0])
    assert push(folder, where, delete_local=True).deleted == 6
    assert all(same(data.read(i), dump) for i, dump in enumerate(dumps))


def test_training_says_where_it_reads(removed: tuple[Path, list[FakeDump]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, dumps = removed
    with open_for_training(folder, ()) as samples:
        assert f"6 of 6 shards are read from hf://datasets/{REPO}" in capsys.readouterr().out
        assert torch.equal(samples.read(7, (AUX,))[AUX], dumps[7].aux)


def test_without_notes_the_next_command_is_named(removed: tuple[Path, list[FakeDump]]) -> None:
    folder, _ = removed
    shutil.rmtree(folder / ".build")
    with pytest.raises(ShardCorrupt, match=f"next: eagle3-data pull MIRROR {folder}"):
        open_samples(folder).read(3)
    with pytest.raises(ShardCorrupt, match="eagle3-data pull"), open_for_training(folder, ()):
        pass
    assert pull(folder).fetched == 6
    assert open_samples(folder).read(3)[IDS].numel() == LENGTHS[3]


def test_a_mirror_that_lost_a_shard(removed: tuple[Path, list[FakeDump]], hub: HubStub) -> None:
    folder, dumps = removed
    del hub.repository(REPO).head.tree[remote_path("train-000002.tar")]
    data = open_samples(folder)
    assert same(data.read(0), dumps[0])
    with pytest.raises(Exception, match=r"train-000002\.tar is not there"):
        data.read(4)


def test_pulled_again_it_is_not_removed_any_more(removed: tuple[Path, list[FakeDump]]) -> None:
    folder, _ = removed
    assert len(deleted_shards(folder)) == 6
    pull(folder)
    assert deleted_shards(folder) == {}
    data = open_samples(folder)
    assert not data.remote
