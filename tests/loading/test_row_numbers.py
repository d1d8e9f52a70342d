"""No export, and no look into the stored column, gives the row numbers behind our columns for what they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

import eagle3_data
from eagle3_data.errors import ConfigError
from eagle3_data.protocol import IDS
from tests.builds import FakeDump, make_build

LENGTHS = (5, 6, 3, 4)
EXPORTS = ("to_csv", "to_dict", "to_json", "to_list", "to_pandas", "to_parquet", "to_polars", "to_sql", "push_to_hub")


@pytest.fixture
def dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FakeDump]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    return make_build(tmp_path / "b", LENGTHS, per_shard=3)


@pytest.fixture(params=[False, True], ids=["rows", "stream"])
def data(tmp_path: Path, dumps: list[FakeDump], request: pytest.FixtureRequest) -> Any:
    whole = eagle3_data.load_dataset(tmp_path / "b", split="train", streaming=request.param)
    return whole.select_columns(["key", "tokens", IDS])


def export(data: Any, method: str, folder: Path) -> Any:
    if method == "to_sql":
        return data.to_sql("rows", f"sqlite:///{folder / 'rows.db'}")
    return getattr(data, method)(*([str(folder / "out")] if method in ("to_csv", "to_json", "to_parquet") else []))


@pytest.mark.parametrize("method", EXPORTS)
def test_exports_of_tensors_are_refused(data: Any, tmp_path: Path, method: str) -> None:
    if method == "push_to_hub":
        splits = datasets.DatasetDict if isinstance(data, datasets.Dataset) else datasets.IterableDatasetDict
        for one in (data, splits({"train": data})):
            with pytest.raises(ConfigError, match="eagle3-data push"):
                one.push_to_hub("org/name")
        return
    with pytest.raises(ConfigError, match=rf"{method} would give row numbers for input_ids\s.*select_columns\(\)"):
        export(data, method, tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_batched_export_is_refused_at_once(data: Any) -> None:
    for method in (data.to_pandas, data.to_dict):
        with pytest.raises(ConfigError, match="row numbers"):
            method(batched=True, batch_size=2)


def test_the_way_that_the_error_names(data: Any, dumps: list[FakeDump], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"map\(lambda row: {'values': row\['input_ids'\].tolist\(\)}, remove_"):
        data.to_pandas()
    plain = data.map(lambda row: {"values": row["input_ids"].tolist()}, remove_columns=["input_ids"])
    plain.to_json(tmp_path / "rows.jsonl")
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["values"] for row in written] == [dump.ids.tolist() for dump in dumps]
    assert [list(ids) for ids in plain.to_pandas()["values"]] == [dump.ids.tolist() for dump in dumps]
    others = data.select_columns(["key", "tokens"])
    assert [row["tokens"] for row in others.to_list()] == list(LENGTHS)


def test_a_stream_that_went_through_map_holds_values(tmp_path: Path, dumps: list[FakeDump]) -> None:
    stream = eagle3_data.load_dataset(tmp_path / "b", split="train", streaming=True)
    rows = stream.map(lambda row: {"n": 1}).to_list()
    assert [row["input_ids"] for row in rows] == [dump.ids.tolist() for dump in dumps]


def test_data_sets_of_others_are_left_alone(tmp_path: Path) -> None:
    other = datasets.Dataset.from_dict({"a": [2, 1, 2]})
    assert other.to_dict() == {"a": [2, 1, 2]}
    assert other.to_iterable_dataset().to_list() == [{"a": 2}, {"a": 1}, {"a": 2}]
    assert sorted(other.unique("a")) == [1, 2]
    assert other.sort("a")["a"][:] == [1, 2, 2]


def test_sort_and_unique_do_not_go_by_row_numbers(tmp_path: Path, dumps: list[FakeDump]) -> None:
    data = eagle3_data.load_dataset(tmp_path / "b", split="train")
    for look in (
        lambda: data.sort(IDS),
        lambda: data.sort(["tokens", IDS]),
        lambda: data.sort(column_names=IDS),
        lambda: data.unique(IDS),
        lambda: data.unique(column=IDS),
    ):
        with pytest.raises(ConfigError, match="would go by the row numbers of input_ids"):
            look()
    assert data.sort("tokens")["tokens"][:] == sorted(LENGTHS)
    assert data.unique("tokens") == list(LENGTHS)
