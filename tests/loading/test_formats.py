"""`with_format` over bf16 tensors, rows and streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

import eagle3_data
from eagle3_data.errors import ConfigError
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from tests.builds import SPEC, FakeDump, make_build

LENGTHS = (5, 6, 3, 4)


@pytest.fixture(params=[False, True], ids=["rows", "stream"])
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    make_build(tmp_path / "b", LENGTHS, per_shard=3)
    return eagle3_data.load_dataset(tmp_path / "b", split="train", streaming=request.param)


def exact(row: dict[str, Any]) -> bool:
    dump = FakeDump(SPEC, LENGTHS[int(row["key"])], int(row["key"]))
    wanted = {AUX: dump.aux, LAST: dump.last, IDS: dump.ids, MASK: dump.mask}
    return all(torch.equal(torch.as_tensor(row[n]).to(t.dtype), t) for n, t in wanted.items() if n in row)


def test_numpy_gives_bf16_as_float32(data: Any) -> None:
    rows = list(data.with_format("numpy"))
    assert [row[AUX].dtype for row in rows] == [np.float32] * 4
    assert rows[1][IDS].dtype == np.int64  # as `datasets` has it for whole numbers
    assert all(map(exact, rows))
    batch = next(iter(data.with_format("numpy").iter(2)))
    assert [len(states) for states in batch[AUX]] == [5, 6]
    assert list(map(exact, data.with_format("numpy").filter(lambda row: len(row[AUX]) > 4))) == [True, True]
    counted = data.with_format("numpy").map(lambda row: {"n": len(row[LAST])})
    assert [int(row["n"]) for row in counted] == list(LENGTHS)
    assert all(map(exact, counted))


def test_torch_rows_go_through_map(data: Any) -> None:
    for kind in (None, "torch"):
        for batched in (False, True):
            mapped = data.with_format(kind).map(lambda row: row, batched=batched, batch_size=3)
            assert all(row[AUX].dtype is torch.bfloat16 and exact(row) for row in mapped)


def test_numpy_rows_under_map_are_copies(data: Any) -> None:
    """Arrays cannot say where they came from: returned, they are refused, or (in a stream) kept as they are."""
    mapped = data.with_format("numpy")
    if isinstance(data, datasets.Dataset):
        with pytest.raises(ConfigError, match="leave it out of what you return"):
            mapped.map(lambda row: row)
    else:
        assert all(map(exact, mapped.map(lambda row: row)))
