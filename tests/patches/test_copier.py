"""Copies from the batch: the right rows, the finite flag, the next token, and no host memory beyond the limit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3_data.patches.sglang.arena import ALIGN, Arena, Block
from eagle3_data.patches.sglang.copier import SHARED_PARTS, Copier, Staged, finite_rows
from eagle3_data.patches.sglang.states import BatchStates
from tests.patches.views import copy, segment

WIDTH, LAYERS, VOCAB = 8, 3, 32


def states(rows: int, requests: int, dtype: torch.dtype = torch.bfloat16, *, listed: bool = False) -> BatchStates:
    torch.manual_seed(rows)
    aux = torch.randn(rows, LAYERS * WIDTH).to(dtype)
    return BatchStates(
        list(aux.split(WIDTH, -1)) if listed else aux,
        torch.randn(rows, WIDTH).to(dtype),
        torch.randn(requests, VOCAB),
    )


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_prompt_gets_its_own_rows(dtype: torch.dtype, listed: bool) -> None:
    batch = states(12, 3, dtype, listed=listed)  # 12 rows, the last two are padding
    packed = batch.aux if isinstance(batch.aux, torch.Tensor) else torch.cat(batch.aux, -1)
    segments = [segment("a", 0, 4, 0), segment("b", 7, 3, 2)]
    copied = copy(Copier("cpu", 1 << 20), batch, segments)
    for rows, mine in zip(copied, segments, strict=True):
        assert rows is not None
        span = slice(mine.offset, mine.offset + mine.rows)
        assert bytes(rows.aux) == packed[span].contiguous().view(torch.uint8).numpy().tobytes()
        assert bytes(rows.last) == batch.last[span].contiguous().view(torch.uint8).numpy().tobytes()
        assert rows.finite()
        assert batch.logits is not None
        assert rows.next_token() == int(batch.logits[mine.index].argmax())


def test_copies_do_not_follow_the_batch() -> None:
    """SGLang may write to the batch's memory as soon as the next forward runs."""
    batch = states(4, 1)
    (rows,) = copy(Copier("cpu", 1 << 20), batch, [segment("a", 0, 4, 0)])
    assert rows is not None
    before = bytes(rows.last)
    batch.last.zero_()
    assert bytes(rows.last) == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["aux", "last"])
def test_a_bad_value_is_flagged_for_its_own_prompt_alone(bad: float, where: str) -> None:
    batch = states(9, 3)
    tensor = batch.last if where == "last" else batch.aux
    assert isinstance(tensor, torch.Tensor)
    tensor[4, 5] = bad
    copied = copy(Copier("cpu", 1 << 20), batch, [segment(n, 3 * i, 3, i) for i, n in enumerate("abc")])
    assert [rows is not None and rows.finite() for rows in copied] == [True, False, True]


def test_largest_values_are_finite() -> None:
    x = torch.tensor([[3.38e38, -3.38e38], [float("nan"), 1.0]], dtype=torch.bfloat16)
    assert finite_rows(x).tolist() == [True, False]


def test_a_prompt_without_host_memory_fails_alone_and_memory_comes_back() -> None:
    copier = Copier("cpu", 8 * ALIGN)
    batch = states(90, 2)
    first, second = copy(copier, batch, [segment("a", 0, 10, 0), segment("b", 10, 80, 1)])
    assert first is not None
    assert second is None
    first.release()
    first.release()  # harmless
    assert copier.arena.free_bytes() == 8 * ALIGN
    assert copy(copier, batch, [segment("c", 0, 10, 0)])[0] is not None


def test_prompts_of_a_batch_share_memory_until_the_last_lets_go() -> None:
    copier = Copier("cpu", 1 << 20)
    copied = copy(copier, states(30, 3), [segment(n, 10 * i, 10, i) for i, n in enumerate("abc")])
    free = copier.arena.free_bytes()
    for rows in copied[:2]:
        assert rows is not None
        rows.release()
        rows.release()
        assert copier.arena.free_bytes() == free
    assert copied[2] is not None
    copied[2].release()
    assert copier.arena.free_bytes() == 1 << 20


def test_a_prompt_that_waits_keeps_no_large_part_of_the_memory_from_others() -> None:
    copier = Copier("cpu", 1 << 20)
    copied = copy(copier, states(64 * 64, 64), [segment(str(i), 64 * i, 64, i) for i in range(64)])
    whole = (1 << 20) - copier.arena.free_bytes()
    assert whole > (1 << 20) // 4
    for rows in copied[1:]:
        assert rows is not None
        rows.release()
    assert (1 << 20) - copier.arena.free_bytes() <= (1 << 20) // SHARED_PARTS


def test_copies_are_made_per_batch_and_not_per_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs the scheduler thread time: 32 prompts of 256 tokens are one batch."""
    made: list[int] = []
    real = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *a, **k: (made.append(len(self)), real(self, *a, **k))[1])
    copier = Copier("cpu", 1 << 20)
    assert None not in copy(copier, states(320, 32), [segment(str(i), 10 * i, 10, i) for i in range(32)])
    assert made == [320, 320, 320, 32]
    made.clear()
    gap = [segment("a", 0, 10, 0), segment("b", 20, 10, 2), segment("c", 30, 10, 3)]  # the second prompt is foreign
    assert None not in copy(copier, states(40, 4), gap)
    assert made == [10, 10, 10, 1, 20, 20, 20, 2]


@pytest.mark.parametrize("device", ["cpu", "faked"])
def test_memory_comes_back_when_the_device_has_none_to_stage_in(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copier = Copier("cpu", 64 * ALIGN)
    if device == "faked":
        fake_device(copier, monkeypatch, [])

    def out_of_memory(*_args: object, **_named: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Staged, "of", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            copy(copier, states(30, 1), [segment("a", 0, 30, 0)], FakeStream())
    assert copier.arena.free_bytes() == 64 * ALIGN


def test_memory_of_an_unfinished_copy_waits_for_it() -> None:
    arena = Arena(4 * ALIGN, pinned=False)
    block = arena.take(4 * ALIGN)
    assert block is not None
    done = SimpleNamespace(happened=False)
    arena.give_back(block, SimpleNamespace(query=lambda: done.happened))
    assert arena.take(ALIGN) is None
    done.happened = True
    assert arena.take(4 * ALIGN) == block


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
@given(st.lists(st.integers(1, 5 * ALIGN), max_size=40), st.randoms())
def test_arena_never_hands_out_a_byte_twice(sizes: list[int], order: object) -> None:
    arena = Arena(16 * ALIGN, pinned=False)
    held: list[Block] = []
    for size in sizes:
        block = arena.take(size)
        if block is None:
            if held:
                arena.give_back(held.pop(order.randrange(len(held))), None)  # type: ignore[attr-defined]
            continue
        assert block[1] - block[0] >= size
        assert all(block[1] <= other[0] or other[1] <= block[0] for other in held)
        held.append(block)
    for block in held:
        arena.give_back(block, None)
    assert arena.take(16 * ALIGN) == (0, 16 * ALIGN)


class FakeStream:
    """Says what waits for what; on a CPU everything runs at once and in order."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


def fake_device(
    copier: Copier,
    monkeypatch: pytest.MonkeyPatch,
    recorded: list[object],
    at_the_first: Callable[[], None] = lambda: None,
) -> FakeStream:
    """Let a CPU's copier use streams; the events recorded go into `recorded`."""

    class FakeEvent:
        def record(self, _stream: object) -> None:
            if not recorded:
                at_the_first()
            recorded.append(self)

        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return True

    own = FakeStream()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _tensor, _stream: None)
    module = SimpleNamespace(Event=lambda **_named: FakeEvent(), stream=lambda _stream: contextlib.nullcontext())
    monkeypatch.setattr(copier, "_module", module)
    monkeypatch.setattr(copier, "_stream", own)
    return own


@pytest.mark.parametrize("listed", [False, True])
def test_the_next_forward_waits_for_the_reading_and_not_for_the_way_to_the_host(
    listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to the host take milliseconds per batch; nothing of them may lie before what the next forward waits for.

    So the batch's memory is overwritten, as the next forward would, at the moment the first event is recorded.
    """
    batch = states(12, 2, listed=listed)
    packed = torch.cat(batch.aux, -1) if isinstance(batch.aux, list) else batch.aux
    wanted_aux, wanted_last = packed[2:9].clone(), batch.last[2:9].clone()
    assert batch.logits is not None
    wanted_token = int(batch.logits[1].argmax())
    copier, producer = Copier("cpu", 1 << 20), FakeStream()
    copier.arena.memory.zero_()
    recorded: list[object] = []
    touched_at_first: list[bool] = []

    def at_the_first() -> None:
        touched_at_first.append(bool(copier.arena.memory.any()))
        for tensor in (*(batch.aux if isinstance(batch.aux, list) else [batch.aux]), batch.last, batch.logits):
            assert tensor is not None
            tensor.fill_(float("nan"))

    own = fake_device(copier, monkeypatch, recorded, at_the_first)
    (rows,) = copy(copier, batch, [segment("a", 2, 7, 1)], producer)
    assert own.waited == [producer]
    assert producer.waited == recorded[:1]
    assert touched_at_first == [False]
    assert rows is not None
    assert bytes(rows.aux) == wanted_aux.view(torch.uint8).numpy().tobytes()
    assert bytes(rows.last) == wanted_last.view(torch.uint8).numpy().tobytes()
    assert rows.finite()
    assert rows.next_token() == wanted_token
