"""The stand-ins for SGLang's CPU kernels take what each SGLang that we support gives them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import eagle3_data.patches.sglang_cpu as sglang_cpu

HEADS, WIDTH, SLOTS = 2, 4, 16


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    path = Path(sglang_cpu.STUBS) / "sgl_kernel" / "attention.py"
    spec = importlib.util.spec_from_file_location("stub_attention", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("scales", [(), (1.0, 1.0)], ids=["before 0.5.23", "0.5.23"])
def test_decoding_and_extending_with_and_without_scales(scales: tuple[float, ...]) -> None:
    torch.manual_seed(0)
    k_buffer, v_buffer = torch.randn(SLOTS, HEADS, WIDTH), torch.randn(SLOTS, HEADS, WIDTH)
    table = torch.arange(SLOTS).view(1, SLOTS)
    q, k, v = (torch.randn(1, HEADS, WIDTH) for _ in range(3))
    row, lengths, slot = torch.tensor([0]), torch.tensor([6]), torch.tensor([5])
    o = torch.zeros(1, HEADS, WIDTH)
    rest = (o, k, v, slot, torch.zeros(1), table, row, lengths, 0.5, 0.0, False, 0, None, None)
    torch.ops.sgl_kernel.decode_attention_cpu(q, k_buffer, v_buffer, *scales, *rest)
    keys, values = k_buffer[:6].transpose(0, 1), v_buffer[:6].transpose(0, 1)
    assert torch.equal(k_buffer[5], k[0])
    weights = torch.softmax(q.transpose(0, 1) @ keys.transpose(1, 2) * 0.5, -1)
    torch.testing.assert_close(o[0], (weights @ values)[:, 0])
    again = torch.zeros(1, HEADS, WIDTH)
    one = torch.tensor([1])
    rest = (table, row, lengths, one, torch.tensor([0]), 1, 0.5, 0.0, False, 0, None, None, None)
    torch.ops.sgl_kernel.extend_attention_cpu(q, k, v, again, k_buffer, v_buffer, *scales, *rest)
    torch.testing.assert_close(again, o)
