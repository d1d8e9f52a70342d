"""What a function under `map` was shown of our columns, and whether it has changed any of it.

A tensor of ours carries its origin. PyTorch counts changes in place; those through `.numpy()` it does not see, so ids
and masks are compared with a copy as well (for states that would cost as much as reading them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from datasets.formatting.formatting import LazyDict

from eagle3_data.builders.tensors import ORIGIN
from eagle3_data.protocol import IDS, MASK

CHANGED: Final = object()
"""In the place of row numbers: not what was shown."""


@dataclass(frozen=True)
class Column:
    """A tensor column: its name in the data set, and whose tensor it holds."""

    column: str
    name: str
    content_id: str


class Shown:
    """Of one call of a function."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id(): a tensor, held so that its id is not given to another, and a copy of what it was."""

    @contextmanager
    def watching(self, args: Sequence[Any]) -> Iterator[None]:
        """Note what is in `args`, and what those that read on access show until the end of the block."""
        lazy = [one for one in args if isinstance(one, LazyDict)]
        for one in args:
            self._note(one)
        for row in lazy:
            row.format = self._noting(row.format)
        try:
            yield
        finally:
            for row in lazy:
                del row.format  # the class's own again, and no cycle that would keep the tensors

    def _noting(self, show: Any) -> Any:
        def format_(key: str) -> Any:
            value = show(key)
            self._note(value)
            return value

        return format_

    def _note(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if getattr(value, ORIGIN, ("", ""))[1] in (IDS, MASK):
                self._copies[id(value)] = value, value.clone()
        elif isinstance(value, list):
            for one in value:
                self._note(one)
        elif isinstance(value, dict):
            self._note(list(value.values()))

    def rows(self, column: Column, value: Any) -> Any:
        """The row number(s) that `value` is of in `column`, None for None; CHANGED if it is not what was shown."""
        if value is None:
            return None
        if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object):
            rows = [self.rows(column, one) for one in value]
            return CHANGED if any(one is CHANGED or isinstance(one, list) for one in rows) else rows
        if not isinstance(value, torch.Tensor):
            return CHANGED
        content_id, name, row, version = getattr(value, ORIGIN, ("", "", -1, -1))
        if (content_id, name, version) != (column.content_id, column.name, value._version):
            return CHANGED
        noted = self._copies.get(id(value))
        return row if noted is None or torch.equal(value, noted[1]) else CHANGED
