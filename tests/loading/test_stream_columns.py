"""Columns of a stream taken away, renamed and cast: every tensor bit for bit, and none read that is not asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

import eagle3_data
from eagle3_data.errors import ConfigError
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from eagle3_data.shards import ShardSet
from tests.builds import FakeDump, make_build

LENGTHS = (5, 6, 3, 1)
META = ["key", "id", "shard", "tokens", "supervised", "next_token"]


@pytest.fixture
def dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FakeDump]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    return make_build(tmp_path / "b", LENGTHS, per_shard=3)


@pytest.fixture(params=["stream", "of rows"])
def stream(tmp_path: Path, dumps: list[FakeDump], request: pytest.FixtureRequest) -> Any:
    if request.param == "stream":
        return eagle3_data.load_dataset(tmp_path / "b", split="train", streaming=True)
    return eagle3_data.load_dataset(tmp_path / "b", split="train").to_iterable_dataset(num_shards=2)


def whole(row: dict[str, Any], dump: FakeDump) -> bool:
    known = {AUX: dump.aux, LAST: dump.last, IDS: dump.ids, MASK: dump.mask, "ids": dump.ids, "states": dump.aux}
    found = {name: tensor for name, tensor in known.items() if name in row}
    return bool(found) and all(torch.equal(row[n], t) and row[n].dtype == t.dtype for n, t in found.items())


CASES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "remove": (lambda s: s.remove_columns(LAST), [*META, AUX, IDS, MASK]),
    # `datasets` takes "id" away with it: it looks for names inside the text
    "remove ids": (lambda s: s.remove_columns(IDS), [*META, AUX, LAST, MASK]),
    "remove two": (lambda s: s.remove_columns(["id", MASK]), [n for n in META if n != "id"] + [AUX, LAST, IDS]),
    "remove twice": (lambda s: s.remove_columns(LAST).remove_columns(AUX), [*META, IDS, MASK]),
    "rename": (lambda s: s.rename_column(IDS, "ids"), [*META, AUX, LAST, "ids", MASK]),
    "rename two": (lambda s: s.rename_columns({IDS: "ids", AUX: "states"}), [*META, "states", LAST, "ids", MASK]),
    "rename plain": (lambda s: s.rename_column("tokens", "n"), [*(n if n != "tokens" else "n" for n in META), AUX]),
    "rename twice": (lambda s: s.rename_column(IDS, "x").rename_column("x", "ids"), ["ids"]),
    "rename, remove": (lambda s: s.rename_column(IDS, "ids").remove_columns([AUX, LAST]), ["ids", MASK]),
    "rename shuffled": (lambda s: s.shuffle(seed=0, buffer_size=2).rename_column(AUX, "states"), ["states"]),
    "torch": (lambda s: s.with_format("torch").rename_column(IDS, "ids").remove_columns(LAST), ["ids", AUX]),
    "map with features": (
        lambda s: s.map(lambda row: {"tokens": row["tokens"]}, features=s.features).rename_column(IDS, "ids"),
        ["ids", AUX],
    ),
    "twice after map": (
        lambda s: (
            s.map(lambda row: {"tokens": row["tokens"]}, features=s.features)
            .rename_column(IDS, "x")
            .rename_column("x", "ids")
            .remove_columns("key")
        ),
        ["ids", AUX],
    ),
    "cast": (lambda s: s.cast_column("tokens", datasets.Value("int64")), [*META, AUX, LAST, IDS, MASK]),
}


@pytest.mark.parametrize("case", CASES)
def test_columns_of_a_stream(stream: Any, dumps: list[FakeDump], case: str) -> None:
    change, names = CASES[case]
    changed = change(stream)
    rows = list(changed)
    assert len(rows) == len(dumps)
    for row, dump in zip(rows, dumps, strict=True):
        assert set(names) <= set(row) == set(changed.features)
        assert whole(row, dumps[int(row["key"])] if "key" in row else dump)
    if case.startswith("remove"):
        assert list(rows[0]) == names


def test_only_the_columns_that_are_left_are_read(
    tmp_path: Path, dumps: list[FakeDump], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = ShardSet.read

    def reading(self: ShardSet, i: int, columns: Any = None) -> dict[str, torch.Tensor]:
        read.extend(columns)
        return real(self, i, columns)

    monkeypatch.setattr(ShardSet, "read", reading)
    stream = eagle3_data.load_dataset(tmp_path / "b", split="train", streaming=True)
    list(stream.remove_columns([AUX, LAST]).rename_column(IDS, "ids").shuffle(seed=0, buffer_size=100))
    assert sorted(read) == [IDS] * 4 + [MASK] * 4


def test_a_changed_column_stays_changed(stream: Any, dumps: list[FakeDump]) -> None:
    """Streams hold values once a function has made them; other numbers than the column's are refused, not cut off."""
    half = stream.map(lambda row: {MASK: row[MASK] * 0}, features=stream.features).rename_column(IDS, "ids")
    assert [int(row[MASK].sum()) for row in half] == [0, 0, 0, 0]
    with pytest.raises(ConfigError, match=f"column {MASK} .* a changed one"):
        list(stream.map(lambda row: {MASK: row[MASK] * 0.5}, features=stream.features).rename_column(IDS, "ids"))


def test_arrays_do_not_go_into_arrow(tmp_path: Path, dumps: list[FakeDump]) -> None:
    data = eagle3_data.load_dataset(tmp_path / "b", split="train")
    with pytest.raises(ConfigError, match="a changed one cannot go there"):
        datasets.Dataset.from_list([dict(row) for row in data], features=data.features)


def test_streams_of_others_are_left_alone() -> None:
    other = datasets.Dataset.from_dict({"a": [1], "b": [2]}).to_iterable_dataset()
    assert list(other.remove_columns("b")) == [{"a": 1}]
    assert list(other.rename_column("b", "c")) == [{"a": 1, "c": 2}]
