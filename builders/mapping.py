"""`Dataset.map` over our columns: a column that a function only looked at stays a row number.

`datasets` writes every column that a function has looked at anew; for ours that would copy the states into the Arrow
cache. So the function is wrapped: what it looked at and did not change is put back as it was.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import datasets
from datasets.formatting.formatting import LazyDict

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
