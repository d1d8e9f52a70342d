"""`load_dataset` by name, by folder and by mirror; what a Hugging Face user tries on it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node

import eagle3_data
from eagle3_data.errors import ConfigError, DatasetUnavailable
from eagle3_data.loading import publish_local
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from tests.builds import FakeDump, make_build

LENGTHS = (5, 64, 3, 100, 17, 8)


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[FakeDump]]:
    """A finished build, and an empty home and Arrow cache."""
    monkeypatch.setattr("eagle3_data.loading.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    monkeypatch.chdir(tmp_path)
    dumps = make_build(tmp_path / "b", LENGTHS)
    return tmp_path / "b", dumps


def same(sample: dict[str, torch.Tensor], dump: FakeDump) -> bool:
    return (
        torch.equal(sample[AUX], dump.aux)
        and torch.equal(sample[LAST], dump.last)
        and torch.equal(sample[IDS], dump.ids)
        and torch.equal(sample[MASK], dump.mask)
        and sample[AUX].dtype is torch.bfloat16
    )


def test_map_style(build: tuple[Path, list[FakeDump]]) -> None:
    folder, dumps = build
    data = load_dataset("eagle3_data/custom", data_dir=str(folder), split="train")
    assert len(data) == len(dumps)
    assert all(same(data[i], dump) for i, dump in enumerate(dumps))
    assert data["tokens"][:] == list(LENGTHS)
    shuffled = data.shuffle(seed=1).select(range(3))
    assert all(same(row, dumps[int(row["key"])]) for row in shuffled)
    long = data.filter(lambda row: row["tokens"] > 10, load_from_cache_file=False)
    assert {row["key"] for row in long} == {"00000001", "00000003", "00000004"}
    assert same(pickle.loads(pickle.dumps(data))[3], dumps[3])


def test_slices_and_dict(build: tuple[Path, list[FakeDump]]) -> None:
    folder, dumps = build
    part = load_dataset("eagle3_data/custom", data_dir=str(folder), split="train[50%:]")
    assert [row["key"] for row in part] == ["00000003", "00000004", "00000005"]
    both = load_dataset("eagle3_data/custom", data_dir=str(folder))
    assert list(both) == ["train"]
    assert same(both["train"][0], dumps[0])


def test_streaming(build: tuple[Path, list[FakeDump]]) -> None:
    folder, dumps = build
    stream = load_dataset("eagle3_data/custom", data_dir=str(folder), split="train", streaming=True)
    assert stream.num_shards == 3
    assert all(same(row, dump) for row, dump in zip(stream, dumps, strict=True))
    assert [row["key"] for row in stream.skip(4)] == ["00000004", "00000005"]
    halves = [list(split_dataset_by_node(stream, rank, 2)) for rank in range(2)]
    assert sorted(row["key"] for half in halves for row in half) == [f"{i:08d}" for i in range(6)]


def test_stream_resumes_where_it_stopped(build: tuple[Path, list[FakeDump]]) -> None:
    folder, dumps = build
    stream = load_dataset("eagle3_data/custom", data_dir=str(folder), split="train", streaming=True)
    seen = []
    for row in stream:
        seen.append(row["key"])
        if len(seen) == 3:
            state = stream.state_dict()
            break
    again = load_dataset("eagle3_data/custom", data_dir=str(folder), split="train", streaming=True)
    again.load_state_dict(state)
    assert [row["key"] for row in again] == ["00000003", "00000004", "00000005"]
    assert len(dumps) == 6


def test_data_loader(build: tuple[Path, list[FakeDump]]) -> None:
    folder, dumps = build
    data = load_dataset("eagle3_data/custom", data_dir=str(folder), split="train")
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, collate_fn=list)
    rows = [row for batch in loader for row in batch]
    assert all(same(row, dump) for row, dump in zip(rows, dumps, strict=True))


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_read_only_what_is_asked_for(build: tuple[Path, list[FakeDump]], streaming: bool) -> None:
    folder, dumps = build
    data = eagle3_data.load_dataset(folder, split="train", streaming=streaming, columns=(IDS, MASK))
    for row, dump in zip(data, dumps, strict=True):
        assert AUX not in row
        assert torch.equal(row[IDS], dump.ids)


def test_tensors_are_not_copied_into_the_arrow_cache(build: tuple[Path, list[FakeDump]], tmp_path: Path) -> None:
    folder, _ = build
    load_dataset("eagle3_data/custom", data_dir=str(folder), split="train")
    cached = sum(path.stat().st_size for path in (tmp_path / "arrow").rglob("*") if path.is_file())
    stored = sum(path.stat().st_size for path in (folder / "data").iterdir())
    assert cached < 20_000 < stored


def test_a_grown_or_replaced_build_is_not_served_from_an_old_cache(
    build: tuple[Path, list[FakeDump]], tmp_path: Path
) -> None:
    folder, _ = build
    assert len(load_dataset("eagle3_data/custom", data_dir=str(folder), split="train")) == 6
    folder.rename(tmp_path / "old")
    dumps = make_build(folder, (9, 9, 9))
    data = load_dataset("eagle3_data/custom", data_dir=str(folder), split="train")
    assert len(data) == 3
    assert same(data[2], dumps[2])


def test_mirror_by_url(build: tuple[Path, list[FakeDump]]) -> None:
    folder, dumps = build
    stream = load_dataset("eagle3_data/custom", mirror=f"file://{folder}", split="train", streaming=True)
    assert all(same(row, dump) for row, dump in zip(stream, dumps, strict=True))
    data = load_dataset("eagle3_data/custom", mirror=f"file://{folder}", split="train")
    assert same(data[3], dumps[3])


def test_name_without_anything_names_all_three_ways(build: tuple[Path, list[FakeDump]]) -> None:
    for streaming in (False, True):
        with pytest.raises(DatasetUnavailable) as caught:
            load_dataset("eagle3_data/kimi_k25_synth", split="train", streaming=streaming)
        for word in ("data_dir=", "mirror=", "server="):
            assert word in str(caught.value)


def test_unknown_name_lists_the_known(build: tuple[Path, list[FakeDump]]) -> None:
    with pytest.raises(DatasetUnavailable, match=r"no data set 'eagle3_data/kimi_k2'.*kimi_k25_synth.*smollm2_demo"):
        load_dataset("eagle3_data/kimi_k2")


def test_kimi_preset_is_true() -> None:
    from eagle3_data.builders.datasets.kimi_k25_synth import RECIPE

    capture = RECIPE.capture
    assert (RECIPE.num_layers, capture.width, capture.layers, capture.dtype) == (61, 7168, (1, 29, 57), "bfloat16")
    assert capture.state_bytes_per_token == 57_344
    assert datasets.get_dataset_config_names("eagle3_data/kimi_k25_synth") == ["default"]
    assert "Kimi-K2.5" in datasets.load_dataset_builder("eagle3_data/kimi_k25_synth").info.description


def test_another_build_does_not_pass_for_kimi(build: tuple[Path, list[FakeDump]]) -> None:
    folder, _ = build
    with pytest.raises(ConfigError, match=r"is not kimi_k25_synth: layers is \(1, 3, 4\)"):
        load_dataset("eagle3_data/kimi_k25_synth", data_dir=str(folder), split="train")


def test_wrong_data_dir(build: tuple[Path, list[FakeDump]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no build"):
        load_dataset("eagle3_data/custom", data_dir=str(tmp_path / "nowhere"), split="train")


def test_published_by_name(build: tuple[Path, list[FakeDump]]) -> None:
    folder, dumps = build
    home = publish_local("custom", folder)
    assert home.is_symlink()
    assert same(load_dataset("eagle3_data/custom", split="train")[0], dumps[0])


PLAIN = """
import sys, glob
folder = sys.argv[1]
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
import safetensors.torch, torch
rows = list(load_dataset(folder, split="train", streaming=True))
arrow = load_dataset(folder, split="train")
import webdataset
urls = sorted(glob.glob(folder + "/data/*.tar"))
web = list(webdataset.WebDataset(urls, shardshuffle=False))
expected = torch.load(folder + ".expected", weights_only=True)
assert len(rows) == len(arrow) == len(web) == len(expected)
for row, stored, sample, (aux, last, ids, mask) in zip(rows, arrow, web, expected):
    for data in (row["safetensors"], stored["safetensors"], sample["safetensors"]):
        tensors = safetensors.torch.load(data)
        assert tensors["aux_hidden_states"].dtype is torch.bfloat16
        assert torch.equal(tensors["aux_hidden_states"], aux)
        assert torch.equal(tensors["last_hidden_state"], last)
        assert torch.equal(tensors["input_ids"], ids) and torch.equal(tensors["loss_mask"], mask)
    assert row["json"]["tokens"] == len(ids)
assert not any(name.split(".")[0] == "eagle3_data" for name in sys.modules)
print("PLAIN READERS AGREE", len(rows))
"""


def test_read_without_this_package(build: tuple[Path, list[FakeDump]], tmp_path: Path) -> None:
    """Plain `datasets` (streaming and Arrow) and plain `webdataset`, in a process that never imports eagle3_data."""
    folder, dumps = build
    torch.save([(d.aux, d.last, d.ids, d.mask) for d in dumps], f"{folder}.expected")
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(folder)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"HF_HOME": str(tmp_path / "h"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
    )
    assert "PLAIN READERS AGREE 6" in done.stdout, done.stderr[-3000:]
