"""What is compiled on a GPU gives what is run as written on a CPU, and is not compiled anew for each batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from eagle3_data.train import fused
from tests.train.reference import make_draft
from tests.train.test_ttt import make_batch, make_model

BATCHES = ([[40, 30, 9]], [[17], [22]], [[50, 11]], [[25, 25, 25]], [[60]], [[9], [31], [12]])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, but without a code generator behind the tracing."""
    torch._dynamo.reset()
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})
    monkeypatch.setattr(fused, "BACKEND", "aot_eager")
    yield
    torch._dynamo.reset()


def run(train: bool, numbers: tuple[int, ...]) -> list[Tensor]:
    draft = make_draft()
    model, found = make_model(draft), []
    for number in numbers:
        batch = make_batch(BATCHES[number], 96, aux_width=144)
        with torch.set_grad_enabled(train), torch.autocast("cpu", torch.bfloat16):
            out = model(batch)
            if train:
                out.loss.backward()
        found += [out.loss.detach(), out.sums, out.calibration]
    return found + [p.grad for p in draft.parameters() if p.grad is not None]


@pytest.mark.usefixtures("compiled")
def test_compiled_functions_give_the_same_and_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = (True, False)
    found = [run(train, (0, 1)) for train in modes]
    with torch._dynamo.config.patch(error_on_recompile=True):
        found += [run(train, (2, 3, 4, 5)) for train in modes]
    monkeypatch.setattr(fused, "DEVICES", set())
    wanted = [run(train, (0, 1)) for train in modes] + [run(train, (2, 3, 4, 5)) for train in modes]
    for ours, theirs in zip(found, wanted, strict=True):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_letters_of_names_tell_which_sizes_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[tuple[tuple[int, ...], int]] = []
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})
    monkeypatch.setattr(fused, "BACKEND", "eager")
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda t, dim: marked.append((tuple(t.shape), dim)))

    def add(x_RH: Tensor, y_HRD: Tensor | None, scale: float, kept_D: Tensor) -> Tensor:
        return x_RH * scale

    fused.fused(add)(torch.ones(3, 4), torch.ones(4, 3, 2), 2.0, torch.ones(2))
    assert marked == [((3, 4), 0), ((4, 3, 2), 1)]
