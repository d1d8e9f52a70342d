"""`Dataset.map` and `filter` over our columns: only what a function looks at is read, and it stays a row number.

`map` writes every column that its function has looked at anew; for ours that would copy the states into the Arrow
cache, so what was looked at and not changed is put back as it was. `filter` shows its function whole rows, which
would read every state; it gets rows that read on access, as those of `map` do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import datasets
from datasets.formatting.formatting import LazyDict, LazyRow

from eagle3_data.builders.tensors import ORIGIN, StateTensor


@dataclass(frozen=True)
class Restoring:
    """`function`, and then the columns as they were. Pickles and hashes as the function and the names."""

    function: Callable[..., Any]
    columns: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        for given in args:
            if isinstance(given, LazyDict):
                for name in self.columns:
                    if name in given.data and name not in given.keys_to_format and _unchanged(given.data[name], name):
                        given.keys_to_format.add(name)
        if isinstance(result, dict):
            for name in self.columns:
                if name in result and _unchanged(result[name], name):
                    result = {**result, name: _rows(result[name])}
        return result


def _unchanged(value: Any, name: str) -> bool:
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(getattr(one, ORIGIN, ("", "", -1))[1] == name for one in values)


def _rows(value: Any) -> Any:
    rows = [int(getattr(one, ORIGIN)[2]) for one in (value if isinstance(value, list) else [value])]
    return rows if isinstance(value, list) else rows[0]


@dataclass(frozen=True)
class EachRow:
    """A filter function of one row, over the rows of a batch. Pickles and hashes as the function."""

    function: Callable[..., Any]
    with_indices: bool
    with_rank: bool

    def __call__(self, batch: LazyDict, *more: Any, **kwargs: Any) -> list[bool]:
        indices = more[0] if self.with_indices else None
        rank = more[-1:] if self.with_rank else ()
        return [
            self.function(
                LazyRow(batch.pa_table.slice(i, 1), batch.formatter),
                *(() if indices is None else (indices[i],)),
                *rank,
                **kwargs,
            )
            for i in range(batch.pa_table.num_rows)
        ]


def teach_filter() -> None:
    """Wrap `datasets.Dataset.filter`, for data sets with our columns alone."""
    original = datasets.Dataset.filter
    if getattr(original, "_eagle3_data", False):
        return

    @functools.wraps(original)
    def filter_(
        self: Any,
        function: Callable[..., Any] | None = None,
        with_indices: bool = False,
        with_rank: bool = False,
        input_columns: Any = None,
        batched: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        ours = any(isinstance(kind, StateTensor) for kind in self.features.values())
        plain = self.format["type"] is None and input_columns is None and not batched
        if ours and plain and function is not None and not inspect.iscoroutinefunction(function):
            function, batched = EachRow(function, with_indices, with_rank), True
        return original(self, function, with_indices, with_rank, input_columns, batched, *args, **kwargs)

    filter_._eagle3_data = True  # type: ignore[attr-defined]
    datasets.Dataset.filter = filter_


def teach_map() -> None:
    """Wrap `datasets.Dataset.map`, for data sets with our columns alone."""
    original = datasets.Dataset.map
    if getattr(original, "_eagle3_data", False):
        return

    @functools.wraps(original)
    def map_(self: Any, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        columns = tuple(name for name, kind in self.features.items() if isinstance(kind, StateTensor))
        if columns and function is not None and not inspect.iscoroutinefunction(function):
            function = Restoring(function, columns)
        return original(self, function, *args, **kwargs)

    map_._eagle3_data = True  # type: ignore[attr-defined]
    datasets.Dataset.map = map_
