"""What `map` may do to our columns: unchanged they stay row numbers, changed they are refused, never dropped."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

import eagle3_data
from eagle3_data.errors import ConfigError
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from tests.builds import FakeDump, make_build

LENGTHS = (5, 6, 3, 4)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    return tmp_path


@pytest.fixture
def dumps(home: Path) -> list[FakeDump]:
    return make_build(home / "b", LENGTHS, per_shard=3)


@pytest.fixture
def data(home: Path, dumps: list[FakeDump]) -> datasets.Dataset:
    return eagle3_data.load_dataset(home / "b", split="train")


def same(row: dict[str, Any], dump: FakeDump) -> bool:
    wanted = {AUX: dump.aux, LAST: dump.last, IDS: dump.ids, MASK: dump.mask}
    return all(torch.equal(row[n], t) and row[n].dtype == t.dtype for n, t in wanted.items())


def drop_returned(row: Any) -> dict[str, Any]:
    row[MASK][:] = 0
    return {MASK: row[MASK]}


def drop_in_row(row: Any) -> Any:
    row[MASK][2:] = 0
    return row


def drop_and_count(row: Any) -> dict[str, Any]:
    return {"left": int(row[MASK].zero_().sum())}


def drop_in_numpy(row: Any) -> Any:
    row[MASK].numpy()[:] = 0
    return row


def scale_states(row: Any) -> Any:
    row[AUX].mul_(0)
    return row


def drop_in_batch(batch: Any) -> Any:
    batch[MASK][-1].zero_()
    return batch


def row_number(row: Any) -> Any:
    row[IDS] = 3
    return row


@pytest.mark.parametrize("kind", [None, "torch"])
@pytest.mark.parametrize("function", [drop_returned, drop_in_row, drop_in_numpy, scale_states])
def test_a_tensor_changed_in_place_is_refused(
    data: datasets.Dataset, function: Callable[[Any], Any], kind: str | None
) -> None:
    """A mask that the function saw as zeros must not be the old one in the result."""
    with pytest.raises(ConfigError, match="a changed one cannot go there"):
        data.with_format(kind).map(function)


def test_other_ways_to_change_one(data: datasets.Dataset) -> None:
    with pytest.raises(ConfigError, match=f"column {MASK} .* a changed one"):
        data.map(drop_in_batch, batched=True)
    with pytest.raises(ConfigError, match=f"column {MASK} .* a changed one"):
        data.map(drop_and_count)  # `map` takes the row's mask as it stands
    assert data.map(drop_and_count, remove_columns=[MASK])["left"][:] == [0, 0, 0, 0]


@pytest.mark.parametrize("function", [row_number, lambda row: {IDS: 3}, lambda row: {IDS: row[MASK].sum()}])
def test_a_number_is_not_taken_for_a_row(data: datasets.Dataset, function: Callable[[Any], Any]) -> None:
    """It would have been read as the row of somebody else's tokens."""
    with pytest.raises(ConfigError, match=f"column {IDS} .* a changed one"):
        data.map(function)


def test_a_tensor_of_another_build_or_column_is_refused(data: datasets.Dataset, home: Path) -> None:
    make_build(home / "other", (9, 8, 7, 6))
    other = eagle3_data.load_dataset(home / "other", split="train")
    for function in (lambda row, i: {IDS: other[i][IDS]}, lambda row, i: {IDS: row[MASK]}):
        with pytest.raises(ConfigError, match=f"column {IDS} .* a changed one"):
            data.map(function, with_indices=True)


def reverse(batch: Any) -> Any:
    for name in list(batch):
        batch[name] = batch[name][::-1]
    return batch


@pytest.mark.parametrize("kind", [None, "torch"])
def test_what_is_not_changed_stays(data: datasets.Dataset, dumps: list[FakeDump], kind: str | None) -> None:
    """Returned whole, in part, merged or in batches (the last of one row, which a format stacks)."""
    data = data.with_format(kind)
    for function, options in (
        (lambda row: row, {}),
        (lambda row: {**row}, {}),
        (lambda row: {IDS: row[IDS], "n": len(row[AUX])}, {}),
        (lambda row: row | {"n": len(row[IDS])}, {}),
        (lambda row: {"n": len(row[AUX])}, {}),
        (lambda batch: batch, {"batched": True, "batch_size": 3}),
        (lambda batch: {name: batch[name] for name in batch}, {"batched": True, "batch_size": 1}),
    ):
        assert all(same(row, dump) for row, dump in zip(data.map(function, **options), dumps, strict=True))
    renamed = data.rename_column(IDS, "ids")
    for row, dump in zip(renamed.map(lambda row: {"ids": row["ids"], "n": len(row["ids"])}), dumps, strict=True):
        assert torch.equal(row["ids"], dump.ids)


def test_a_batch_in_another_order(data: datasets.Dataset, dumps: list[FakeDump]) -> None:
    """Columns that were set in the batch: put back as they were, they would no longer fit the others."""
    turned = data.map(reverse, batched=True, batch_size=3)
    assert turned["key"][:] == ["00000002", "00000001", "00000000", "00000003"]
    assert all(same(row, dumps[int(row["key"])]) for row in turned)


def test_the_mark_of_a_tensor_does_not_stand_in_the_way(data: datasets.Dataset, dumps: list[FakeDump]) -> None:
    kept = io.BytesIO()
    torch.save(data[1][IDS], kept)
    kept.seek(0)
    assert torch.equal(torch.load(kept, weights_only=True), dumps[1].ids)
