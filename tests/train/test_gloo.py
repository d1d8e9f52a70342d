"""Several ranks over gloo: the same samples, the same curve, equal steps, and a resume at another world size."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the optimizer loads it; here once, not in every forked rank
from safetensors.torch import load_file

from eagle3_data.protocol import MASK
from eagle3_data.server.process import free_port
from eagle3_data.shards import ShardSet
from eagle3_data.train.checkpoint import DRAFT, OPTIMIZER, checkpoints
from tests.train.gloo_worker import Job, rank_main, seven_shards


@dataclass(frozen=True)
class Ran:
    samples: list[int]
    """In the order of the plan, ranks interleaved."""
    losses: dict[int, float]
    steps: list[int]
    """Steps made, per rank."""
    weights: dict[str, torch.Tensor]
    rows: dict[int, float]
    ranks: list[dict[str, Any]]


def launch(job: Job, world: int, *, env: dict[str, str] | None = None) -> list[Any]:
    """What each rank returned, or its traceback."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true"}
    common |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # else Accelerate gives every rank all cores
    common |= env or {}
    if world > 1:
        common["WORLD_SIZE"] = str(world)
    ranks = [
        context.Process(
            target=rank_main,
            args=(queue, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, job),
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        answers = dict(queue.get(timeout=200) for _ in ranks)
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    return [answers[rank] for rank in range(world)]


def run(job: Job, world: int, *, env: dict[str, str] | None = None) -> Ran:
    results = launch(job, world, env=env)
    for result in results:
        assert isinstance(result, dict), result
    samples = [
        sample
        for step in zip(*(result["used"] for result in results), strict=True)
        for micro in zip(*step, strict=True)
        for batch in micro
        for sample in batch
    ]
    lines = [json.loads(line) for line in (job.out / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    rows = {line["step"]: line["train/rows_0"] for line in lines if "train/rows_0" in line}
    tensors = load_file(checkpoints(job.out)[-1] / DRAFT)
    return Ran(samples, losses, [result["step"] for result in results], tensors, rows, results)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seven_shards(tmp_path_factory.mktemp("gloo") / "data")


@pytest.fixture(scope="module")
def one_rank(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    assert len(list((shards / "data").glob("*.tar"))) == 7
    ran = run(Job(tmp_path_factory.mktemp("gloo") / "one", shards), 1)
    data = ShardSet.open(shards)
    alone = [i for i in set(ran.samples) if not data.read(i, (MASK,))[MASK].any()]
    assert alone  # a micro-batch with nothing to train is among them
    return ran


def assert_same(ours: Ran, theirs: Ran) -> None:
    assert ours.samples == theirs.samples
    assert ours.losses.keys() == theirs.losses.keys()
    for step, loss in theirs.losses.items():
        assert ours.losses[step] == pytest.approx(loss, rel=1e-4), step
    for name, tensor in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_train_as_one(world: int, one_rank: Ran, shards: Path, tmp_path: Path) -> None:
    """C59, C62: 4 micro-batches of unequal shape per step over `world` ranks, from 7 unequal shards; the last step of
    an epoch has fewer micro-batches, and one has nothing to train."""
    many = run(Job(tmp_path / "many", shards), world)
    assert len(set(many.steps)) == 1
    assert_same(many, one_rank)
    assert len(many.samples) == 2 * len(set(many.samples))  # every sample once per epoch


def test_killed_twice_and_resumed_at_other_world_sizes(one_rank: Ran, shards: Path, tmp_path: Path) -> None:
    """SIGKILL in epoch 1 on two ranks, in epoch 2 on four, one to the end: no gap, no repeat, the same curve."""
    total = max(one_rank.losses)
    out = tmp_path / "resumed"
    first = run(Job(out, shards, kill_at=2), 2)
    second = run(Job(out, shards, kill_at=total), 4)
    third = run(Job(out, shards), 1)
    assert (first.steps, second.steps, third.steps) == ([1, 1], [total - 1] * 4, [total])
    per_epoch = len(one_rank.samples) // 2
    assert len(first.samples) < per_epoch < len(first.samples + second.samples)
    assert first.samples + second.samples + third.samples == one_rank.samples
    assert_same(replace(third, samples=one_rank.samples), one_rank)


def test_stopped_on_two_ranks_and_gone_on_with_by_one(one_rank: Ran, shards: Path, tmp_path: Path) -> None:
    """One rank is told to stop, and both do, at the same step and with a checkpoint of it."""
    out = tmp_path / "stopped"
    first = run(Job(out, shards, stop_at=2), 2)
    assert (first.steps, [rank["stopped"] for rank in first.ranks]) == ([2, 2], ["interrupted"] * 2)
    second = run(Job(out, shards), 1)
    assert first.samples + second.samples == one_rank.samples
    assert_same(replace(second, samples=one_rank.samples), one_rank)


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def test_fsdp2_trains_as_one_rank_and_resumes_from_it(one_rank: Ran, shards: Path, tmp_path: Path) -> None:
    """Parameters and moments in two shards; stopped, gone on with by one rank without FSDP, and sharded again."""
    out = tmp_path / "sharded"
    first = run(Job(out, shards, stop_at=2), 2, env=FSDP2)
    second = run(Job(out, shards, stop_at=4), 1)
    third = run(Job(out, shards), 2, env=FSDP2)
    assert first.samples + second.samples + third.samples == one_rank.samples
    assert_same(replace(third, samples=one_rank.samples), one_rank)
    whole = one_rank.ranks[0]["held"]
    assert sum(rank["held"] for rank in third.ranks) == whole
    assert max(rank["held"] for rank in third.ranks) < 0.6 * whole


def test_fsdp2_in_bf16_keeps_float32_weights_moments_and_sums(shards: Path, tmp_path: Path) -> None:
    """Evaluated right before each save, when a forward pass has just put whole bf16 parameters in the shards' place."""
    alone = run(Job(tmp_path / "alone", shards, precision="bf16", eval_every=1), 1)
    many = run(Job(tmp_path / "many", shards, precision="bf16", eval_every=1), 2, env=FSDP2)
    moments = load_file(checkpoints(tmp_path / "many")[-1] / OPTIMIZER)
    assert set(moments) == set(load_file(checkpoints(tmp_path / "alone")[-1] / OPTIMIZER))
    for name, tensor in many.weights.items():
        if name not in ("d2t", "t2d"):
            assert tensor.dtype == moments[f"{name}.exp_avg"].dtype == torch.float32, name
            assert not tensor.equal(tensor.bfloat16().float()), name
    assert many.ranks[0]["dtypes"] == {"torch.float32"}
    assert many.rows == alone.rows  # counts of rows are exact
    assert many.losses == pytest.approx(alone.losses, rel=2e-3)
