"""Micro-batches: exact cover, equal steps (C59), one cursor for any number of ranks, speed from the index alone."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest

from eagle3_data.errors import ConfigError
from eagle3_data.train.config import BatchConfig, DataConfig
from eagle3_data.train.plan import Cursor, EpochPlan, Step, plan_batches, share, split_samples

DATA = DataConfig(folder="unused", max_sample_tokens=512, holdout_share=0.1)  # type: ignore[arg-type]


def make_plan(tokens: np.ndarray, batch: BatchConfig) -> EpochPlan:
    keys = [f"k{i}" for i in range(len(tokens))]
    split = split_samples(keys, tokens, DATA, seed=1)
    return EpochPlan(split, tokens, batch, max_sample_tokens=512, seed=1, fingerprint="f")


def lengths(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 700, count).astype(np.int32)


@pytest.mark.parametrize("packing", [False, True])
def test_every_sample_once_within_the_budget(packing: bool) -> None:
    tokens = lengths(1000)
    config = BatchConfig(micro_batch_tokens=1024, packing=packing, bucket_samples=128, pad_multiple=8)
    batches = plan_batches(np.arange(1000), tokens, config, max_sample_tokens=512, order=np.random.default_rng(0))
    assert sorted(s for b in batches for s in b.samples) == list(range(1000))
    for batch in batches:
        assert batch.positions <= 1024
        for row in batch.rows:
            assert sum(min(int(tokens[s]), 512) for s in row) <= batch.length
    used = sum(min(int(n), 512) for n in tokens) / sum(b.positions for b in batches)
    assert used > (0.97 if packing else 0.85)


def walk(plan: EpochPlan, world: int, cursor: Cursor, epochs: int, stop_after: int | None = None) -> list[list[Step]]:
    """The steps of all ranks; entry r is rank r's."""
    ranks = [list(plan.steps(cursor, rank=r, world=world, epochs=epochs))[:stop_after] for r in range(world)]
    assert len({len(steps) for steps in ranks}) == 1
    return ranks


def seen(ranks: list[list[Step]]) -> list[int]:
    """Samples in the order of the steps, ranks interleaved as they are planned."""
    order = []
    for per_rank in zip(*ranks, strict=True):
        assert len({len(step.batches) for step in per_rank}) == 1  # equal forward and backward passes
        for micro in zip(*(step.batches for step in per_rank), strict=True):
            order += [s for batch in micro if batch is not None for s in batch.samples]
    return order


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_ranks_end_together_and_see_each_sample_once_per_epoch(world: int) -> None:
    """C59: shards of unequal size play no part, the plan is over samples."""
    plan = make_plan(lengths(203), BatchConfig(micro_batch_tokens=1024, batches_per_step=4))
    ranks = walk(plan, world, Cursor(), epochs=2)
    order = seen(ranks)
    assert Counter(order) == {int(s): 2 for s in plan.split.train}
    assert order == seen(walk(plan, 1, Cursor(), epochs=2))
    assert ranks[0][-1].after == Cursor(2, 0)


def test_stop_and_go_on_at_other_world_sizes_has_no_gap_and_no_repeat() -> None:
    plan = make_plan(lengths(150), BatchConfig(micro_batch_tokens=1024, batches_per_step=3))
    whole = seen(walk(plan, 1, Cursor(), epochs=3))
    per_epoch = plan.steps_left(Cursor(), 1)
    first = walk(plan, 2, Cursor(), epochs=3, stop_after=per_epoch // 2)
    second = walk(plan, 4, first[0][-1].after, epochs=3, stop_after=per_epoch)  # ends in epoch 2
    assert second[0][-1].after.epoch == 1
    third = walk(plan, 3, second[0][-1].after, epochs=3)
    assert seen(first) + seen(second) + seen(third) == whole


def test_epochs_differ_and_are_reproducible() -> None:
    plan = make_plan(lengths(80), BatchConfig(micro_batch_tokens=1024))
    again = make_plan(lengths(80), BatchConfig(micro_batch_tokens=1024))
    assert plan.epoch(0) == again.epoch(0)
    assert plan.epoch(0) != plan.epoch(1)
    assert plan.key == again.key
    assert plan.key != make_plan(lengths(80), BatchConfig(micro_batch_tokens=2048)).key


def test_share_pads_with_none() -> None:
    plan = make_plan(lengths(30), BatchConfig(micro_batch_tokens=1024))
    batches = plan.epoch(0)[:5]
    parts = [share(batches, rank=r, world=4) for r in range(4)]
    assert [len(part) for part in parts] == [2, 2, 2, 2]
    assert [part[1] is None for part in parts] == [False, True, True, True]


def test_holdout_is_by_key_and_short_samples_are_counted() -> None:
    tokens = np.array([2, 50, 60, 1, 600, 80] * 20, dtype=np.int32)
    keys = [f"k{i}" for i in range(120)]
    split = split_samples(keys, tokens, DATA, seed=3)
    assert (split.dropped, len(split.holdout)) == (40, 8)
    assert split.cut == int((tokens[split.train] > 512).sum())
    assert len(split.train) + len(split.holdout) + split.dropped == 120
    order = np.random.default_rng(0).permutation(120)
    shuffled = split_samples([keys[i] for i in order], tokens[order], DATA, seed=3)
    assert {keys[i] for i in split.holdout} == {keys[order[i]] for i in shuffled.holdout}
    with pytest.raises(ConfigError, match="no sample to train on"):
        split_samples(["a"], np.array([2], dtype=np.int32), DATA, seed=0)


@pytest.mark.parametrize("packing", [False, True])
def test_first_batch_of_100_000_samples_is_planned_within_two_seconds(packing: bool) -> None:
    tokens = lengths(100_000)
    config = BatchConfig(micro_batch_tokens=8192, packing=packing)
    began = time.process_time()  # other work on the machine does not count
    plan = make_plan(tokens, config)
    next(plan.steps(Cursor(), rank=0, world=1, epochs=1))
    assert time.process_time() - began < 2.0


def test_turns_of_a_conversation_are_on_one_side() -> None:
    keys = [f"{row:08d}_t{turn}" for row in range(100) for turn in (0, 1, 2)] + [
        f"{row:08d}" for row in range(100, 200)
    ]
    split = split_samples(keys, np.full(len(keys), 50, dtype=np.int32), DATA, seed=0)
    rows = lambda samples: {keys[i][:8] for i in samples}  # noqa: E731
    assert not rows(split.train) & rows(split.holdout)
    assert 0 < len(split.holdout) <= round(0.1 * len(keys))
    three = np.full(3, 50, dtype=np.int32)
    assert len(split_samples(keys[:3], three, DATA, seed=0).holdout) == 0, "one conversation is trained on"
    assert len(split_samples([keys[0], keys[1], keys[3]], three, DATA, seed=0).train) in (1, 2)


def test_the_share_done_does_not_depend_on_batches_per_step() -> None:
    """A run that is resumed with other batches per step is where it was, and ends at 1."""
    tokens = lengths(150)
    plans = [make_plan(tokens, BatchConfig(micro_batch_tokens=1024, batches_per_step=n)) for n in (1, 4)]
    cursors = [step.after for step in plans[1].steps(Cursor(), rank=0, world=1, epochs=4)]
    shares = [[plan.share(cursor, 4) for cursor in cursors] for plan in plans]
    assert shares[0] == shares[1] == sorted(shares[0])
    assert (plans[0].share(Cursor(), 4), shares[0][-1]) == (0.0, 1.0)
    left = [plans[1].steps_left(cursor, 4) for cursor in cursors]
    assert left[-1] == 0
    assert all(0 <= a - b <= 2 for a, b in itertools.pairwise(left))  # later epochs are estimated
