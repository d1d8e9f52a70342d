"""The draft vocabulary: offset form, order, padding, and maps that are never taken for one another (C26)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_data.errors import ConfigError, TrainingError
from eagle3_data.train import vocab as maps
from eagle3_data.train.plan import split_samples
from eagle3_data.train.vocab_choice import make_vocab, move_head
from tests.train.conftest import MakeConfig
from tests.train.fakes import random_samples


def test_offset_form_and_order() -> None:
    counts = np.array([5, 0, 9, 1, 0, 7, 7])
    vocab = maps.build_map(counts, 4)
    assert vocab.kept.tolist() == [0, 2, 5, 6]  # the most frequent, in target order
    assert vocab.d2t.tolist() == [0, 1, 3, 3]
    assert (torch.arange(4) + vocab.d2t).tolist() == vocab.t2d.nonzero().flatten().tolist()
    assert vocab.coverage == pytest.approx(28 / 29)
    assert maps.map_from_d2t(vocab.d2t, 7).kept.tolist() == vocab.kept.tolist()


def test_unseen_low_ids_fill_up() -> None:
    vocab = maps.build_map(np.array([0, 0, 0, 4, 0, 2]), 4)
    assert vocab.kept.tolist() == [0, 1, 3, 5]
    assert (vocab.seen, vocab.padded, vocab.coverage) == (2, 2, 1.0)
    assert "100.00%" in vocab.report()


def test_only_supervised_tokens_count() -> None:
    ids, mask = torch.tensor([1, 2, 2, 3]), torch.tensor([0, 1, 1, 0])
    assert maps.count_tokens([(ids, mask)], 5).tolist() == [0, 0, 2, 0, 0]
    with pytest.raises(ConfigError, match="token id 7"):
        maps.count_tokens([(torch.tensor([7]), torch.tensor([1]))], 5)


def test_another_size_gets_its_own_map_and_the_old_one_stays(make_config: MakeConfig, tmp_path: Path) -> None:
    """C26: 32,000 -> 16,000 in the same run folder, here 256 -> 128."""
    data = random_samples([40] * 20, width=64, vocab=768)
    config = make_config()
    split = split_samples(data.keys, data.tokens, config.data, seed=0)

    def make(size: int, vocab_size: int = 768) -> maps.VocabMap:
        return make_vocab(config, data, split, size=size, vocab_size=vocab_size, target=None, say=lambda text: None)

    large = make(256)
    (file,) = (config.run.output / "vocab").glob("vocab-*.safetensors")
    before = (file.read_bytes(), file.stat().st_mtime_ns)
    small = make(128)
    assert (large.size, small.size) == (256, 128)
    assert set(small.kept.tolist()) <= set(large.kept.tolist())
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    assert len(list((config.run.output / "vocab").glob("vocab-*.safetensors"))) == 2
    reads = dict(data.reads)
    assert make(128).kept.tolist() == small.kept.tolist()
    assert data.reads == reads  # the stored map was used
    data.fingerprint = "other data"
    make(128)
    assert data.reads != reads  # and not for other data
    assert make(800, vocab_size=768).size == 768


def test_wrong_maps_are_refused() -> None:
    with pytest.raises(TrainingError, match="offset"):
        maps.map_from_d2t(torch.tensor([0, 5, 9]) * -1, 100)
    with pytest.raises(TrainingError, match="offset"):
        maps.map_from_d2t(torch.tensor([3, 98, 99]), 100)
    with pytest.raises(ConfigError, match=r"1\.\.3"):
        maps.build_map(np.zeros(3), 4)


def test_coverage_by_script() -> None:
    counts = np.array([10, 5, 5, 2])
    vocab = maps.build_map(counts, 2)
    pieces = {0: " the", 1: "жар", 2: "漢", 3: "!?"}
    rows = maps.coverage_by_script(counts, vocab, pieces)
    found = {row.script: (row.tokens, row.coverage) for row in rows}
    assert found == {"LATIN": (10, 1.0), "CYRILLIC": (5, 1.0), "CJK": (5, 0.0), "OTHER": (2, 0.0)}


def test_coverage_of_every_script_is_kept_and_the_largest_are_said(
    make_config: MakeConfig, tiny_llama: Path, tmp_path: Path
) -> None:
    data = random_samples([40] * 20, width=64, vocab=768)
    config, said = make_config(), []
    split = split_samples(data.keys, data.tokens, config.data, seed=0)
    for _ in range(2):  # the second time out of the file
        made = make_vocab(config, data, split, size=128, vocab_size=768, target=tiny_llama, say=said.append)
    (file,) = (config.run.output / "vocab").glob("vocab-128-*.coverage.json")
    rows = json.loads(file.read_text())
    assert sum(row["tokens"] for row in rows) == 20 * len(split.train)
    whole = sum(row["tokens"] * row["coverage"] for row in rows) / (20 * len(split.train))
    assert whole == pytest.approx(made.coverage)
    assert sum("latin: " in line for line in said) == 2
    assert sum("counting" in line for line in said) == 1


def test_a_head_moves_to_another_map_by_token() -> None:
    old = maps.build_map(np.array([9, 0, 8, 0, 7, 0]), 3)  # 0, 2, 4
    new = maps.build_map(np.array([0, 9, 8, 0, 7, 6]), 4)  # 1, 2, 4, 5
    old_head, start = torch.randn(3, 5), torch.randn(4, 5)
    moved = move_head(old_head, old.d2t, new, start)
    assert torch.equal(moved, torch.stack([start[0], old_head[1], old_head[2], start[3]]))
    whole = torch.randn(6, 5)
    assert torch.equal(move_head(whole, None, new, start), whole[[1, 2, 4, 5]])
