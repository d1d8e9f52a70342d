"""What a Hugging Face user tries: every call here is one that people write, on a build and on a mirror over HTTP."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node

from eagle3_data.builders.datasets import smollm2_demo
from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import BuildFailed, ConfigError, DatasetUnavailable
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from eagle3_data.shards import ShardSet
from tests.builds import FakeDump, make_build
from tests.webserver import FolderServer

LENGTHS = (5, 64, 3, 100, 17, 8)
TENSORS = (AUX, LAST, IDS, MASK)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, Arrow cache and working folder."""
    monkeypatch.setattr("eagle3_data.loading.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["folder", "http"])
def where(home: Path, request: pytest.FixtureRequest) -> Iterator[tuple[dict[str, str], list[FakeDump]]]:
    """Arguments of `load_dataset` for the same build here and behind a web server."""
    dumps = make_build(home / "b", LENGTHS)
    if request.param == "folder":
        yield {"data_dir": str(home / "b")}, dumps
        return
    with FolderServer(home / "b") as server:
        yield {"mirror": server.url}, dumps


@pytest.fixture
def build(home: Path) -> tuple[str, list[FakeDump]]:
    return str(home / "b"), make_build(home / "b", LENGTHS)


class Reads(list[tuple[int, tuple[str, ...]]]):
    """Every (row, columns) that is read from the shards."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found, real = Reads(), ShardSet.read

    def read(self: ShardSet, i: int, columns: Any = None) -> dict[str, torch.Tensor]:
        found.append((i, tuple(columns or TENSORS)))
        return real(self, i, columns)

    monkeypatch.setattr(ShardSet, "read", read)
    return found


def same(row: dict[str, Any], dump: FakeDump) -> bool:
    wanted = {AUX: dump.aux, LAST: dump.last, IDS: dump.ids, MASK: dump.mask}
    return all(torch.equal(row[n], t) and row[n].dtype == t.dtype for n, t in wanted.items())


def custom(where: dict[str, str], **options: Any) -> Any:
    return load_dataset("eagle3_data/custom", split=options.pop("split", "train"), **where, **options)


def test_rows_slices_and_columns(where: tuple[dict[str, str], list[FakeDump]]) -> None:
    """C43 through the builder: bfloat16 comes back as bfloat16, bit for bit."""
    args, dumps = where
    data = custom(args)
    assert data.column_names == ["key", "id", "shard", "tokens", "supervised", "next_token", *TENSORS]
    assert all(same(data[i], dump) for i, dump in enumerate(dumps))
    assert data[0][AUX].dtype is torch.bfloat16
    assert [len(ids) for ids in data[IDS]] == list(LENGTHS)
    batch = data[1:3]
    assert torch.equal(batch[AUX][1], dumps[2].aux)
    assert [row["key"] for row in custom(args, split="train[:50%]")] == ["00000000", "00000001", "00000002"]
    assert len(custom(args, split="train[1:3]+train[5:]")) == 3


def test_transforms_keep_what_they_should(where: tuple[dict[str, str], list[FakeDump]]) -> None:
    args, dumps = where
    data = custom(args)
    for view in (data.shuffle(seed=3), data.select([4, 1]), data.take(2), data.skip(3), data.sort("tokens")):
        assert all(same(row, dumps[int(row["key"])]) for row in view)
    parts = data.train_test_split(0.5, seed=0)
    assert {row["key"] for part in parts.values() for row in part} == {f"{i:08d}" for i in range(6)}
    renamed = data.rename_column(AUX, "a").remove_columns([LAST])
    assert torch.equal(renamed[3]["a"], dumps[3].aux)
    assert LAST not in renamed[3]
    assert same(pickle.loads(pickle.dumps(data))[1], dumps[1])


def test_with_format_torch(where: tuple[dict[str, str], list[FakeDump]]) -> None:
    args, dumps = where
    for streaming in (False, True):
        for row, dump in zip(custom(args, streaming=streaming).with_format("torch"), dumps, strict=True):
            assert same(row, dump)


def test_map_copies_no_states(where: tuple[dict[str, str], list[FakeDump]], home: Path) -> None:
    """Looked at, returned, batched, with processes, twice: results are right and the cache stays an index."""
    args, dumps = where
    data = custom(args)

    def count(row: dict[str, Any]) -> dict[str, Any]:
        return {"total": float(row[AUX].float().sum()), "n": len(row[IDS])}

    def touch(row: Any) -> Any:
        row["n"] = len(row[MASK])
        return row

    for mapped in (data.map(count), data.map(count), data.map(touch), data.map(count, num_proc=2)):
        assert list(mapped["n"]) == list(LENGTHS)
        assert all(same(row, dump) for row, dump in zip(mapped, dumps, strict=True))
    batched = data.map(lambda b: {"n": [len(x) for x in b[IDS]]}, batched=True, batch_size=2)
    assert list(batched["n"]) == list(LENGTHS)
    assert same(batched[4], dumps[4])
    cached = sum(path.stat().st_size for path in (home / "arrow").rglob("*") if path.is_file())
    assert cached < 60_000
    with pytest.raises(ConfigError, match="a changed one cannot go there"):
        data.map(lambda row: {IDS: row[IDS] + 1})


def test_changing_ids_in_place_changes_nothing_else(build: tuple[str, list[FakeDump]]) -> None:
    folder, dumps = build
    data = custom({"data_dir": folder})
    row = data[1]
    row[IDS].zero_()
    row[MASK].fill_(9)
    assert same(data[1], dumps[1])


def test_only_columns_that_are_looked_at_are_read(build: tuple[str, list[FakeDump]], reads: Reads) -> None:
    """Counted at the reader: filters and ids-only loops never touch a state."""
    folder, _ = build
    data = custom({"data_dir": folder})
    long = data.filter(lambda row: row["tokens"] > 10, load_from_cache_file=False)
    assert len(long) == 3
    assert len(data.filter(lambda row, i, rank: i > 3 and rank is None, with_indices=True, with_rank=True)) == 2
    list(data.select_columns(["key", "tokens"]))
    custom({"data_dir": folder}, columns=())
    assert reads == []
    for narrow in (
        data.select_columns([IDS, MASK]),
        data.remove_columns([AUX, LAST]),
        custom({"data_dir": folder}, columns=(IDS, MASK)),
        custom({"data_dir": folder}, streaming=True).select_columns([IDS, MASK]),
        custom({"data_dir": folder}, columns=[IDS, MASK], streaming=True),
    ):
        reads.clear()
        assert len(list(narrow)) == 6
        assert {columns for _, columns in reads} == {(IDS,), (MASK,)}
        assert len(reads) == 12
    with pytest.raises(ConfigError, match="no column 'states'"):
        custom({"data_dir": folder}, columns=("states",))


def test_shuffle_buffer_holds_row_numbers(build: tuple[str, list[FakeDump]], reads: Reads) -> None:
    """A buffer of 1,000 samples of 352 MB would not fit anywhere; here a sample is read when it leaves the buffer."""
    folder, dumps = build
    stream = custom({"data_dir": folder}, streaming=True).shuffle(seed=1, buffer_size=1000)
    first = next(iter(stream))
    assert same(first, dumps[int(first["key"])])
    assert {row for row, _ in reads} == {int(first["key"])}
    assert sorted(row["key"] for row in stream) == [f"{i:08d}" for i in range(6)]


def test_streams(where: tuple[dict[str, str], list[FakeDump]]) -> None:
    args, dumps = where
    stream = custom(args, streaming=True)
    assert stream.num_shards == 3
    assert stream.column_names is not None
    assert all(same(row, dump) for row, dump in zip(stream, dumps, strict=True))
    assert [row["key"] for row in stream.skip(4)] == ["00000004", "00000005"]
    assert [row["n"] for row in stream.map(lambda row: {"n": len(row[IDS])})] == list(LENGTHS)
    assert [row["tokens"] for row in stream.filter(lambda row: row["tokens"] > 50)] == [64, 100]
    keys = [[row["key"] for row in split_dataset_by_node(stream, rank, 3)] for rank in range(3)]
    assert keys == [["00000000", "00000001"], ["00000002", "00000003"], ["00000004", "00000005"]]
    again = custom(args, streaming=True)
    for number, _ in enumerate(stream):
        if number == 2:
            again.load_state_dict(stream.state_dict())
            break
    assert [row["key"] for row in again] == ["00000003", "00000004", "00000005"]


@pytest.mark.parametrize("streaming", [False, True])
def test_data_loader_workers(where: tuple[dict[str, str], list[FakeDump]], streaming: bool) -> None:
    args, dumps = where
    data = custom(args, streaming=streaming)
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2)
    rows = list(loader)
    assert len(rows) == 6
    assert all(same(row, dumps[int(row["key"])]) for row in rows)


def test_builder_and_inspection(home: Path) -> None:
    make_build(home / "b", LENGTHS)
    args = {"data_dir": str(home / "b")}
    builder = datasets.load_dataset_builder("eagle3_data/custom", **args)
    assert builder.info.features is not None
    builder.download_and_prepare(num_proc=2)
    assert len(builder.as_dataset(split="train")) == 6
    assert datasets.get_dataset_split_names("eagle3_data/custom", **args) == ["train"]
    info = datasets.get_dataset_config_info("eagle3_data/custom", **args)
    assert info.splits["train"].num_examples == 6
    for name in ("kimi_k25_synth", "smollm2_demo"):
        assert datasets.get_dataset_config_names(f"eagle3_data/{name}") == ["default"]
        assert list(datasets.load_dataset_builder(f"eagle3_data/{name}", "default").info.features)[-4:] == list(TENSORS)
    with pytest.raises(ConfigError, match="without its states"):
        builder.download_and_prepare(output_dir=str(home / "p"), file_format="parquet")


@pytest.mark.parametrize("name", ["kimi_k25_synth", "smollm2_demo"])
def test_the_named_data_sets(home: Path, name: str) -> None:
    """Both, at their own widths (57,344 bytes per token for Kimi-K2.5): here, as a mirror, as a stream, in part."""
    import importlib

    recipe = importlib.import_module(f"eagle3_data.builders.datasets.{name}").RECIPE
    dumps = make_build(home / "b", [2 + i % 3 for i in range(10)], per_shard=4, spec=recipe.capture)
    for args in ({"data_dir": str(home / "b")}, {"mirror": f"file://{home / 'b'}"}):
        for streaming in (False, True):
            rows = list(load_dataset(f"eagle3_data/{name}", "default", split="train", streaming=streaming, **args))
            assert all(same(row, dump) for row, dump in zip(rows, dumps, strict=True))
        part = load_dataset(f"eagle3_data/{name}", split="train[:10%]", columns=AUX, **args)
        assert part.column_names[-1] == AUX
        assert [row["key"] for row in part] == ["00000000"]
        assert part[0][AUX].dtype is getattr(torch, recipe.capture.dtype)
    assert recipe.capture.tensors(1)[0][2] == (1, 3 * recipe.capture.width)


def test_streams_pickle(where: tuple[dict[str, str], list[FakeDump]]) -> None:
    args, dumps = where
    stream = pickle.loads(pickle.dumps(custom(args, streaming=True)))
    assert all(same(row, dump) for row, dump in zip(stream, dumps, strict=True))


def test_inspection_with_nothing_at_hand(home: Path) -> None:
    """What is known of a named data set is told; of `custom` nothing is, and our error is the one that is shown."""
    for name in ("kimi_k25_synth", "smollm2_demo"):
        path = f"eagle3_data/{name}"
        info = datasets.get_dataset_config_info(path)
        assert list(info.features)[-4:] == list(TENSORS)
        assert datasets.get_dataset_split_names(path) == ["train"]
        assert list(datasets.get_dataset_infos(path)) == ["default"]
        with pytest.raises(DatasetUnavailable, match="no build, no mirror and no server"):
            load_dataset(path, split="train")
    assert datasets.get_dataset_config_names("eagle3_data/custom") == ["default"]
    for look in (datasets.get_dataset_config_info, datasets.get_dataset_infos, datasets.get_dataset_split_names):
        with pytest.raises(DatasetUnavailable, match="no build, no mirror and no server"):
            look("eagle3_data/custom")
    # a build that comes later is not held to the sizes that were not known
    make_build(home / "home" / "eagle3_data" / "smollm2_demo", LENGTHS, spec=smollm2_demo.RECIPE.capture)
    assert datasets.get_dataset_config_info("eagle3_data/smollm2_demo").splits["train"].num_examples == 6
    assert len(load_dataset("eagle3_data/smollm2_demo", split="train")) == 6


def test_num_proc_and_download_mode(build: tuple[str, list[FakeDump]]) -> None:
    folder, dumps = build
    for mode in ("reuse_dataset_if_exists", "force_redownload", "reuse_cache_if_exists"):
        data = custom({"data_dir": folder}, num_proc=2, download_mode=mode)
        assert same(data[3], dumps[3])


def test_a_moved_folder_is_read_where_it_is_now(build: tuple[str, list[FakeDump]], home: Path) -> None:
    """Same content, same Arrow cache, another place: the place is not part of the cache."""
    folder, dumps = build
    custom({"data_dir": folder})
    Path(folder).rename(home / "moved")
    assert same(custom({"data_dir": str(home / "moved")})[2], dumps[2])


def test_two_builds_are_never_mixed_up(home: Path) -> None:
    """`concatenate_datasets` of two builds would read the rows of one in the other: refused by the types."""
    make_build(home / "a", (9, 9))
    make_build(home / "b", (5, 5, 5))
    with pytest.raises(ValueError, match="align"):
        datasets.concatenate_datasets([custom({"data_dir": str(home / n)}) for n in "ab"])


def test_exports_name_the_better_way(build: tuple[str, list[FakeDump]], home: Path) -> None:
    folder, _ = build
    data = custom({"data_dir": folder})
    for export, word in (
        (lambda: data.save_to_disk(str(home / "s")), "cp -r"),
        (lambda: data.shuffle(seed=0).save_to_disk(str(home / "s")), "cp -r"),
        (lambda: datasets.DatasetDict({"train": data}).save_to_disk(str(home / "s")), "cp -r"),
        (lambda: data.push_to_hub("a/b"), "eagle3-data push"),
        (lambda: data.to_parquet(str(home / "p")), "select_columns"),
    ):
        with pytest.raises(ConfigError, match=word):
            export()
    data.select_columns(["key", "tokens"]).save_to_disk(str(home / "s"))
    assert list(datasets.load_from_disk(str(home / "s"))["tokens"]) == list(LENGTHS)
    datasets.Dataset.from_dict({"a": [1]}).save_to_disk(str(home / "t"))
    assert len(datasets.load_from_disk(str(home / "t"))) == 1


def test_revision_reaches_the_mirror(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`revision=` of `load_dataset` is the mirror's; the commit that the hub names is what is read from then on."""
    make_build(home / "b", LENGTHS)
    commit = "0123456789abcdef0123456789abcdef01234567"
    with FolderServer(home / "b") as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        server.headers = {"X-Repo-Commit": commit}
        server.strip = lambda path: path.split("/", 6)[-1]
        data = load_dataset("eagle3_data/custom", mirror="org/name", revision="v1", split="train", token="hf_secret")
        assert len(data[1][IDS]) == LENGTHS[1]
        asked = [request.path for request in server.asked if "/resolve/" in request.path]
        assert asked[0] == "/datasets/org/name/resolve/v1/manifest.json"
        assert {path.split("/")[5] for path in asked[1:]} == {commit}
    written = [path for path in (home / "arrow").rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if b"hf_secret" in path.read_bytes()]


def test_shard_cache(home: Path) -> None:
    make_build(home / "b", LENGTHS)
    with FolderServer(home / "b") as server:
        args = {"mirror": server.url, "shard_cache": str(home / "c")}
        for _ in range(2):
            assert len([row[AUX] for row in custom(args)]) == 6
        assert len([asked for asked in server.asked if asked.path.endswith(".tar") and asked.start == 0]) == 3


# ------------------------------------------------------------- generation


def test_nothing_is_deleted_when_generation_fails(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` removes its own folder on any exception; what servers made must not lie there."""
    calls: list[Path] = []

    def build(config: Any, *, on_tick: Any, on_text: Any) -> Any:
        calls.append(config.out)
        if len(calls) == 1:
            (config.out / "data").mkdir()
            (config.out / "data" / ".train-000000.tar.tmp").write_text("hours of GPU time")
            raise BuildFailed("the server died", next="start it again")
        assert (config.out / "data" / ".train-000000.tar.tmp").read_text() == "hours of GPU time"
        make_build(config.out, LENGTHS, spec=spec)
        return type("Report", (), {"complete": True})

    spec: CaptureSpec = smollm2_demo.RECIPE.capture
    monkeypatch.setattr("eagle3_data.builders.generate.build", build)
    (home / "c.jsonl").write_text(json.dumps({"messages": []}))
    options = {"server": "http://127.0.0.1:1", "inputs": str(home / "c.jsonl"), "split": "train"}
    for streaming in (False, True):
        calls.clear()
        out = home / f"out-{streaming}"
        with pytest.raises(BuildFailed, match="the server died"):
            load_dataset("eagle3_data/smollm2_demo", data_dir=str(out), streaming=streaming, **options)
        data = load_dataset("eagle3_data/smollm2_demo", data_dir=str(out), streaming=streaming, **options)
        assert [row["tokens"] for row in data] == list(LENGTHS)
        assert next(iter(data))[AUX].dtype is getattr(torch, spec.dtype)
        assert calls == [out, out]  # and once it is complete, no server is asked again


def test_mirror_that_is_away(home: Path) -> None:
    with pytest.raises(DatasetUnavailable, match="nothing-here"):
        custom({"mirror": f"file://{home}/nothing-here"})


PLAIN_HTTP = """
import sys
from datasets import load_dataset
import safetensors.torch, torch
urls = sys.argv[2:]
rows = list(load_dataset("webdataset", data_files={"train": urls}, split="train", streaming=True))
expected = torch.load(sys.argv[1], weights_only=True)
assert len(rows) == len(expected)
for row, (aux, ids) in zip(rows, expected):
    tensors = safetensors.torch.load(row["safetensors"])
    assert tensors["aux_hidden_states"].dtype is torch.bfloat16
    assert torch.equal(tensors["aux_hidden_states"], aux) and torch.equal(tensors["input_ids"], ids)
    assert row["json"]["tokens"] == len(ids)
assert not any(name.split(".")[0] == "eagle3_data" for name in sys.modules)
print("PLAIN STREAM AGREES", len(rows))
"""


def test_plain_datasets_streams_a_mirror(home: Path) -> None:
    """A process that never imports this package, plain `datasets`, ranges over HTTP: bf16, bit for bit (C43)."""
    dumps = make_build(home / "b", LENGTHS)
    torch.save([(dump.aux, dump.ids) for dump in dumps], home / "expected")
    with FolderServer(home / "b") as server:
        urls = [f"{server.url}/data/train-{i:06d}.tar" for i in range(3)]
        done = subprocess.run(
            [sys.executable, "-c", PLAIN_HTTP, str(home / "expected"), *urls],
            capture_output=True,
            text=True,
            cwd=home,
            env={"HF_HOME": str(home / "h"), "HF_UPDATE_DOWNLOAD_COUNTS": "0", "PATH": "/usr/bin:/bin"},
        )
    assert "PLAIN STREAM AGREES 6" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize("workers", [0, 2])
def test_seven_shards_four_ranks(home: Path, workers: int) -> None:
    """C59 for streams: unequal shards, ranks and workers that do not divide them; no sample twice, none left out.

    Equal steps are the training plan's business (tests/train/test_plan.py), not a stream's.
    """
    make_build(home / "b", [3 + i % 5 for i in range(13)], per_shard=2)
    seen = []
    for rank in range(4):
        stream = custom({"data_dir": str(home / "b")}, streaming=True, columns=())
        assert stream.num_shards == 7
        part = split_dataset_by_node(stream, rank, 4)
        loader = torch.utils.data.DataLoader(part, batch_size=None, num_workers=workers)
        keys = [row["key"] for row in loader]
        if workers == 0:
            assert len(keys) in (3, 4)  # with workers `datasets` splits each worker's shards, so counts differ more
        seen += keys
    assert sorted(seen) == [f"{i:08d}" for i in range(13)]
