"""The copier on a real GPU: streams, pinned memory, and states that are overwritten right after the copy was asked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_data.patches.sglang.copier import Copier, finite_rows
from eagle3_data.patches.sglang.dumps import DumpForm
from eagle3_data.patches.sglang.states import BatchStates
from eagle3_data.patches.sglang.writers import Work, Writers
from eagle3_data.protocol import AUX, LAST, SpoolConfig
from tests.patches.views import copy, segment, view
from tests.servers import read_dump

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH, LAYERS = 4096, 3
MIB = 1 << 20


def wrong_bytes(tensor: torch.Tensor, found: memoryview) -> int:
    """Bytes of `found` that differ from the tensor's (compared on the GPU, which is quicker)."""
    here = torch.frombuffer(bytearray(found), dtype=torch.uint8).cuda()
    return int((here != tensor.contiguous().view(torch.uint8).reshape(-1)).sum())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_states_are_copied_before_the_next_forward_rewrites_them(overlap: bool, listed: bool) -> None:
    """Twenty forwards through the same buffers, as a replayed graph would write them."""
    copier = Copier("cuda", 2048 * MIB)
    forward: Any = torch.cuda.Stream() if overlap else torch.cuda.current_stream()
    rows = 2048
    buffers = [torch.empty(rows, WIDTH, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    last = torch.empty(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    packed = torch.empty(rows, LAYERS * WIDTH, dtype=torch.bfloat16, device="cuda")
    logits = torch.empty(2, 1000, device="cuda")
    taken = []
    for step in range(20):
        with torch.cuda.stream(forward):
            for i, buffer in enumerate(buffers):
                buffer.fill_(step + i / 8)
            last.fill_(step + 0.5)
            packed.copy_(torch.cat(buffers, -1))
            logits.zero_()
            logits[1, step] = 1.0
        states = BatchStates(list(buffers) if listed else packed, last, logits)
        (rows_there,), done = copier.copy(states, [segment("a", 100, 1500, 1)], forward)
        assert rows_there is not None
        taken.append((rows_there, done))
    for step, (rows_there, done) in enumerate(taken):
        done.synchronize()
        copied = view(copier, rows_there)
        wanted = torch.cat([torch.full((1500, WIDTH), step + i / 8, dtype=torch.bfloat16) for i in range(LAYERS)], -1)
        assert wrong_bytes(wanted.cuda(), copied.aux) == 0, step
        assert wrong_bytes(torch.full((1500, WIDTH), step + 0.5, dtype=torch.bfloat16).cuda(), copied.last) == 0, step
        assert copied.finite()
        assert copied.next_token() == step
        copied.release()
    assert copier.arena.free_bytes() == 2048 * MIB


def test_asking_for_a_copy_does_not_wait_for_it() -> None:
    copier = Copier("cuda", 3072 * MIB)
    rows = 16384
    states = BatchStates(
        torch.randn(rows, LAYERS * WIDTH, dtype=torch.bfloat16, device="cuda"),
        torch.randn(rows, WIDTH, dtype=torch.bfloat16, device="cuda"),
        torch.randn(1, 1000, device="cuda"),
    )
    forward = torch.cuda.current_stream()
    for warm in copy(copier, states, [segment("a", 0, rows, 0)], forward):
        assert warm is not None
        warm.release()
    torch.cuda.synchronize()
    began = time.perf_counter()
    (rows_there,), done = copier.copy(states, [segment("a", 0, rows, 0)], forward)
    asked = time.perf_counter() - began
    assert rows_there is not None
    done.synchronize()
    whole = time.perf_counter() - began
    copied = view(copier, rows_there)
    nbytes = len(copied.aux) + len(copied.last)
    print(f"asked in {asked * 1e3:.2f} ms; {nbytes / MIB:.0f} MiB there after {whole * 1e3:.1f} ms")
    assert asked < whole / 4
    copied.release()


def test_the_finite_check_needs_no_memory_of_the_states_size() -> None:
    x = torch.randn(65536, WIDTH, dtype=torch.bfloat16, device="cuda")
    x[7, 9], x[9, 1], x[11, 0] = float("nan"), float("inf"), float("-inf")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    finite = finite_rows(x)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 8 * MIB  # x is 512 MiB
    assert (~finite).nonzero().flatten().tolist() == [7, 9, 11]


def test_another_process_writes_what_the_gpu_computed(tmp_path: Path) -> None:
    """Ten batches through the same buffers; host memory is a few batches, so blocks are used again and again."""
    form = DumpForm(layers=(1, 2, 3), width=WIDTH, dtype="bfloat16", instance="test")
    copier, forward = Copier("cuda", 512 * MIB), torch.cuda.current_stream()
    writers = Writers(tmp_path, SpoolConfig(), form, copier.arena)
    rows = 1024
    aux = torch.empty(2 * rows, LAYERS * WIDTH, dtype=torch.bfloat16, device="cuda")
    last = torch.empty(2 * rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    wanted = {}
    for step in range(10):
        aux.normal_()
        last.normal_()
        segments = [segment(f"{step}{part}", part * rows, rows, part) for part in range(2)]
        for one in segments:
            span = slice(one.offset, one.offset + rows)
            wanted[one.prompt.rid] = (aux[span].cpu().clone(), last[span].cpu().clone())
        deadline = time.monotonic() + 60
        while copier.arena.free_bytes() < 100 * MIB:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        copied, done = copier.copy(BatchStates(aux, last, None), segments, forward)
        work = Work()
        for one, there in zip(segments, copied, strict=True):
            assert there is not None
            work.rows(one.prompt, 0, there)
        writers.put(work, done)
    writers.close(60.0)
    assert (writers.counters.written, writers.counters.failed) == (20, 0)
    for rid, (its_aux, its_last) in wanted.items():
        _, tensors = read_dump(tmp_path / f"{rid}.safetensors")
        assert torch.equal(tensors[AUX], its_aux)
        assert torch.equal(tensors[LAST], its_last)
    assert copier.arena.free_bytes() == 512 * MIB
