"""Inputs that change between two runs of a build, and the damage that a repeated build meets."""

from __future__ import annotations

import shutil
from pathlib import Path

import datasets
import pytest

from eagle3_data.builders.stored import describe_inputs
from eagle3_data.errors import ManifestMismatch, ShardCorrupt
from tests.builders.conftest import Builds, write_samples


def rendered(builds: Builds) -> int:
    """How many runs rendered their inputs instead of using what an earlier one had rendered."""
    return sum(" samples from " in text for text in builds.texts)


def test_a_folder_that_changed_between_runs_is_noticed(builds: Builds) -> None:
    folder = builds.folder / "in"
    folder.mkdir()
    write_samples(folder / "a.jsonl", 10)
    with builds.server() as server:
        assert builds.run("out", folder, server.url).planned == 10
        assert builds.run("out", folder, server.url).planned == 10
        assert rendered(builds) == 1
        (folder / "notes.txt").write_text("not an input")
        assert builds.run("out", folder, server.url).planned == 10
        assert rendered(builds) == 1
        write_samples(folder / "b.jsonl", 10, seed=9)
        with pytest.raises(ManifestMismatch, match="samples"):
            builds.run("out", folder, server.url)
        (folder / "b.jsonl").unlink()
        assert builds.run("out", folder, server.url).complete
        write_samples(folder / "a.jsonl", 10, seed=77)
        with pytest.raises(ManifestMismatch, match="samples"):
            builds.run("out", folder, server.url)


def test_a_saved_data_set_is_told_by_its_rows(builds: Builds, tmp_path: Path) -> None:
    def save(number: int) -> dict[str, object]:
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        rows = [{"input_ids": [number, 2], "loss_mask": [0, 1]}]
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
        return describe_inputs(builds.config("out", tmp_path / "saved"))

    first = save(1)
    (tmp_path / "saved" / "cache-0123.arrow").write_bytes(b"what map() leaves")
    assert describe_inputs(builds.config("out", tmp_path / "saved")) == first
    assert save(2) != first


def test_a_finished_build_with_a_damaged_index_says_so(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 10)
    with builds.server() as server:
        builds.run("out", samples, server.url)
        (builds.folder / "out" / "index" / "train.parquet").write_bytes(b"PAR1garbage")
        with pytest.raises(ShardCorrupt, match=r"train\.parquet is damaged"):
            builds.run("out", samples, server.url)
