"""`with_format("torch")` and `with_format("numpy")` over our tensors.

`datasets` copies each tensor for "torch": the copy keeps the origin, so that `map` can tell it from a changed one.
NumPy has no bf16: those come as float32, which holds every value of it (`datasets` writes bf16 tensors so, too).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets.formatting.np_formatter import NumpyFormatter
from datasets.formatting.torch_formatter import TorchFormatter

from eagle3_data.builders.tensors import ORIGIN
from eagle3_data.builders.wrapping import wrap_once


def teach_formats() -> None:
    """Wrap the step of both formats that makes tensors or arrays of a row, a column or a batch."""
    for formatter in (TorchFormatter, NumpyFormatter):
        wrap_once(formatter, "recursive_tensorize", _tensorizing)


def _tensorizing(original: Callable[..., Any]) -> Callable[..., Any]:
    def recursive_tensorize(self: Any, values: Any) -> Any:
        if isinstance(self, NumpyFormatter):
            return original(self, _widened(values))
        made = original(self, values)
        _carry(values, made)
        return made

    return recursive_tensorize


def _widened(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return values.float() if values.dtype is torch.bfloat16 else values
    if isinstance(values, dict):
        return {name: _widened(value) for name, value in values.items()}
    return [_widened(value) for value in values] if isinstance(values, list) else values


def _carry(values: Any, made: Any) -> None:
    """Origins, from tensors to their copies. A stack of tensors of one column gets the list of their rows."""
    if isinstance(values, dict):
        for name, value in values.items():
            _carry(value, made[name])
    elif isinstance(values, torch.Tensor):
        if hasattr(values, ORIGIN):
            content_id, name, row, _ = getattr(values, ORIGIN)
            setattr(made, ORIGIN, (content_id, name, row, made._version))
    elif isinstance(values, list) and isinstance(made, list):
        for value, one in zip(values, made, strict=True):
            _carry(value, one)
    elif isinstance(values, list) and isinstance(made, torch.Tensor):
        origins = [getattr(value, ORIGIN, ("", "", -1, -1)) for value in values]
        if len({origin[:2] for origin in origins}) == 1 and origins[0][0]:
            setattr(made, ORIGIN, (*origins[0][:2], [origin[2] for origin in origins], made._version))
