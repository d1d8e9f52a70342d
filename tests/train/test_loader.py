"""Reading: right contents in reused buffers, nothing but the index before step 1 (C53), real shards, clean ends."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import ShardCorrupt
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from eagle3_data.shards import ShardSet
from eagle3_data.shards.remote import RemoteShardSet
from eagle3_data.train import loader
from eagle3_data.train.config import BatchConfig, DataConfig
from eagle3_data.train.loader import (
    BufferPool,
    Collator,
    HostBatch,
    LoadedStep,
    Prefetcher,
    Samples,
    empty_batch,
    to_device,
)
from eagle3_data.train.plan import Cursor, EpochPlan, MicroBatch, split_samples
from tests.builds import make_build
from tests.train.fakes import MemorySamples, random_samples

DATA = DataConfig(folder="unused", max_sample_tokens=64, holdout_share=0.0)  # type: ignore[arg-type]
DEPTH = 2


def make_plan(data: Samples, batch: BatchConfig) -> EpochPlan:
    split = split_samples(data.keys, data.tokens, DATA, seed=0)
    return EpochPlan(split, data.tokens, batch, max_sample_tokens=64, seed=0, fingerprint="f")


def make_loader(data: Samples, plan: EpochPlan) -> tuple[Prefetcher, BufferPool]:
    pool = BufferPool(data.capture, positions=plan.largest_batch(), count=DEPTH + 1, pinned=False)
    collator = Collator(data, max_sample_tokens=64, steps=3, alignment="strict", reader_threads=2)
    return Prefetcher(plan.steps(Cursor(), rank=0, world=1, epochs=1), collator, pool, depth=DEPTH), pool


def check_batch(host: HostBatch, data: Samples) -> None:
    for row, samples in enumerate(host.micro.rows):
        for number, sample in enumerate(samples):
            here = host.batch.document[row] == number
            stored = data.read(sample, (AUX, LAST, IDS, MASK))
            count = min(int(data.tokens[sample]), 64)
            assert torch.equal(host.batch.input_ids[row, here].to(torch.int32), stored[IDS][:count])
            assert torch.equal(host.batch.aux[row, here], stored[AUX][:count])
            assert torch.equal(host.batch.last[row, here], stored[LAST][:count])
            assert torch.equal(host.loss_mask[row, here], stored[MASK][:count])
            assert host.batch.positions[row, here].tolist() == list(range(count))
    padding = host.batch.document == -1
    assert not host.batch.aux[padding].any()  # what an earlier batch left there would be NaN times zero


@pytest.mark.parametrize("packing", [False, True])
def test_contents_counts_and_bounded_memory(packing: bool) -> None:
    data = random_samples([10, 33, 64, 90, 7, 21, 55, 3] * 5, width=8, vocab=50)
    data.samples[5][AUX][:] = float("nan")  # a bad sample must not leak through a reused buffer
    plan = make_plan(data, BatchConfig(micro_batch_tokens=128, batches_per_step=3, packing=packing))
    loader, pool = make_loader(data, plan)
    pointers, seen = set(), []
    with loader:
        for loaded, batches in loader:
            counted = torch.zeros(3, dtype=torch.int64)
            for host in batches:
                assert host is not None
                if 5 not in host.micro.samples:
                    check_batch(host, data)
                counted += host.batch.rows.flatten(1).sum(-1)
                pointers.add(host.buffer.aux.data_ptr())
                seen += host.micro.samples
                pool.give(host.buffer)
            assert counted.tolist() == loaded.counts_S.tolist()  # known before the first batch was read
    assert sorted(seen) == list(range(40))
    assert len(pointers) <= DEPTH + 1
    assert pool.nbytes == (DEPTH + 1) * plan.largest_batch() * 8 * 4 * 4  # 3 aux + last, 8 wide, float32


def test_rows_of_a_whole_micro_batch_are_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, sixty samples took longer than a GPU's whole step, with the interpreter's lock held."""
    data = random_samples([9] * 12, width=8, vocab=96)
    (first, *_) = make_plan(data, BatchConfig(micro_batch_tokens=108, pad_multiple=4, packing=True)).epoch(0)
    collator = Collator(data, max_sample_tokens=64, steps=3, alignment="strict", reader_threads=1)
    calls, made = 0, loader.row_masks

    def counting(*args: Any, **named: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return made(*args, **named)

    monkeypatch.setattr(loader, "row_masks", counting)
    counts = collator.count_rows(first)
    assert len(list(first.samples)) == 12
    assert calls == 1
    # an answer of 5 tokens from position 4 on: its rows at step i are those whose target lies in it
    assert counts.tolist() == [12 * 4, 12 * 3, 12 * 2]
    collator.close()


def test_nothing_but_loss_masks_and_the_first_batches_is_read_before_the_first_step() -> None:
    """C53, sized down: a pass over all payloads before step 1 is what made others' trainers look hung."""
    data = random_samples([20] * 2000, width=8, vocab=50)
    plan = make_plan(data, BatchConfig(micro_batch_tokens=64, batches_per_step=2))
    loader, _ = make_loader(data, plan)
    with loader:
        first = next(iter(loader))
        assert isinstance(first[0], LoadedStep)
        host = next(first[1])
        assert host is not None
    assert data.reads[AUX] <= 3 * (DEPTH + 2)  # three samples per batch
    assert data.reads[MASK] <= 100


def test_an_error_in_the_reader_reaches_the_loop_and_threads_end() -> None:
    data = random_samples([20] * 30, width=8, vocab=50)

    class Broken(MemorySamples):
        def read(self, i: int, columns: object = None) -> dict[str, torch.Tensor]:
            if i == 7:
                raise OSError("disk is gone")
            return super().read(i, columns)  # type: ignore[arg-type]

    broken = Broken(data.capture, data.samples)
    loader, pool = make_loader(broken, make_plan(broken, BatchConfig(micro_batch_tokens=64, batches_per_step=2)))
    with loader:
        drain(loader, pool)
        assert isinstance(loader.error, OSError)  # kept for the loop, where all ranks can learn of it
        *_, (last, batches) = loader
        assert (last.step.batches, last.counts_S.sum(), list(batches)) == ((), 0, [])
    assert not [t for t in threading.enumerate() if t.name.startswith("eagle3-prefetch")]


def test_leaving_early_does_not_hang() -> None:
    data = random_samples([20] * 200, width=8, vocab=50)
    loader, _ = make_loader(data, make_plan(data, BatchConfig(micro_batch_tokens=64, batches_per_step=2)))
    with loader:
        next(iter(loader))
    assert not [t for t in threading.enumerate() if t.name.startswith("eagle3-prefetch")]


def test_real_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 states out of several tar shards, from the files straight into the buffers."""
    make_build(tmp_path / "build", lengths=[5, 64, 9, 100, 17, 8, 31, 70, 12, 40, 40, 6, 22, 64], per_shard=4)
    data = ShardSet.open(tmp_path / "build")
    plan = make_plan(data, BatchConfig(micro_batch_tokens=128, batches_per_step=2))
    loader, pool = make_loader(data, plan)
    seen = []
    read, mapped = ShardSet.read, []

    def recorded(self: ShardSet, i: int, columns: tuple[str, ...]) -> dict[str, torch.Tensor]:
        if threading.current_thread() is not threading.main_thread():
            mapped.extend(columns)
        return read(self, i, columns)

    monkeypatch.setattr(ShardSet, "read", recorded)
    with loader:
        for _, batches in loader:
            for host in batches:
                assert host is not None
                assert host.batch.aux.dtype == torch.bfloat16
                check_batch(host, data)
                seen += host.micro.samples
                pool.give(host.buffer)
    assert sorted(seen) == list(range(14))
    assert set(mapped) == {MASK}  # the rows to train are counted before; states go through no mapping


def test_samples_of_a_mirror(tmp_path: Path) -> None:
    """The same micro-batches, read by byte ranges."""
    make_build(tmp_path / "build", lengths=[5, 64, 9, 100, 17, 8, 31, 70], per_shard=3)
    local, remote = ShardSet.open(tmp_path / "build"), RemoteShardSet.open(f"file://{tmp_path / 'build'}")
    plan = make_plan(remote, BatchConfig(micro_batch_tokens=128, batches_per_step=2))
    assert plan.key == make_plan(local, BatchConfig(micro_batch_tokens=128, batches_per_step=2)).key
    loader, pool = make_loader(remote, plan)
    seen = []
    with loader:
        for _, batches in loader:
            for host in batches:
                assert host is not None
                check_batch(host, local)
                seen += host.micro.samples
                pool.give(host.buffer)
    assert sorted(seen) == list(range(8))


def drain(loader: Prefetcher, pool: BufferPool) -> None:
    for _, batches in loader:
        for host in batches:
            if host is not None:
                pool.give(host.buffer)


def test_c67_a_cut_shard_stops_the_loader(tmp_path: Path) -> None:
    """The policy is to stop: an epoch is never silently short."""
    make_build(tmp_path / "b", [20] * 30, per_shard=3)
    path = tmp_path / "b/data/train-000004.tar"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    data = ShardSet.open(tmp_path / "b")
    plan = make_plan(data, BatchConfig(micro_batch_tokens=60))
    loader, pool = make_loader(data, plan)
    with loader:
        drain(loader, pool)
    assert isinstance(loader.error, ShardCorrupt)  # the trainer raises it where all ranks meet
    assert re.search(r"train-000004\.tar, sample 000000(12|13|14)", str(loader.error))


@pytest.mark.parametrize("last", ["hidden", "topk:4"])
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_no_batch_looks_into_a_buffer_that_was_given_back(last: str, stored: str, compute: torch.dtype) -> None:
    """Top-k logits are integers, which nothing converts: on a CPU they were a view of what is read into next."""
    capture = CaptureSpec(model="m", layers=(1, 2, 4), width=8, dtype=stored, vocab_size=50, last=last)
    pool = BufferPool(capture, positions=16, count=1, pinned=False)
    buffer = pool.take()
    assert buffer is not None
    for tensor in (buffer.aux, buffer.last):
        tensor.view(torch.uint8).fill_(2)
    batch = empty_batch(capture, steps=2, length=16)
    batch = replace(batch, aux=buffer.aux.view(1, 16, -1), last=buffer.last.view(1, 16, -1))
    host = HostBatch(batch, buffer, 16, torch.zeros(1, 16, dtype=torch.uint8), MicroBatch(((0,),), 16))
    ready = to_device(host, batch, torch.device("cpu"), compute, pool)
    before = ready.aux.clone(), ready.last.clone()
    assert pool.take() is buffer
    for tensor in (buffer.aux, buffer.last):
        tensor.view(torch.uint8).fill_(1)
    assert torch.equal(ready.aux, before[0])
    assert torch.equal(ready.last, before[1])
