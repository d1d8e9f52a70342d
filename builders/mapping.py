"""`Dataset.map` and `filter` over our columns: only what a function looks at is read, and it stays a row number.

`map` writes every column that its function has looked at anew; for ours that would copy the states into the Arrow
cache, so what was looked at and not changed is put back as it was. `filter` shows its function whole rows, which
would read every state; it gets rows that read on access, as those of `map` do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import datasets
from datasets.formatting.formatting import LazyDict, LazyRow

from eagle3_data.builders.shown import CHANGED, Column, Shown
from eagle3_data.builders.tensors import refusal, tensor_columns
from eagle3_data.builders.wrapping import wrap_once


@dataclass(frozen=True)
class Restoring:
    """`function`, and then the columns as they were. Pickles and hashes as the function and the names.

    Raises ConfigError where a changed tensor, or anything else, would take the place of one of ours.
    """

    function: Callable[..., Any]
    columns: tuple[Column, ...]
    removed: tuple[str, ...] = ()
    """Columns that `map` takes away afterwards, whatever the function made of them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shown = Shown()
        with shown.watching(args):
            result = self.function(*args, **kwargs)
        for one in {id(one): one for one in (*args, result) if isinstance(one, LazyDict)}.values():
            self._restore(one, shown)
        if isinstance(result, Mapping) and not isinstance(result, LazyDict):
            rows = {one.column: shown.rows(one, result[one.column]) for one in self.columns if one.column in result}
            for name, value in rows.items():
                if value is CHANGED:
                    raise refusal(name)
            return {**result, **rows} if rows else result
        return result

    def _restore(self, row: LazyDict, shown: Shown) -> None:
        """In a row that reads on access; `map` takes from it what was looked at as it stands now, returned or not."""
        for one in self.columns:
            name = one.column
            if name not in row.data or name in row.keys_to_format:
                continue
            rows = shown.rows(one, row.data[name])
            if rows is CHANGED:
                if name not in self.removed:
                    raise refusal(name)
            elif (rows if isinstance(rows, list) else [rows]) == row.pa_table.column(name).to_pylist():
                row.keys_to_format.add(name)
            else:  # tensors of other rows: a batch in another order
                row.data[name] = rows


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
    wrap_once(datasets.Dataset, "filter", _filtering)


def _filtering(original: Callable[..., Any]) -> Callable[..., Any]:
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
        ours = tensor_columns(self.features)
        plain = self.format["type"] is None and input_columns is None and not batched
        if ours and plain and function is not None and not inspect.iscoroutinefunction(function):
            function, batched = EachRow(function, with_indices, with_rank), True
        return original(self, function, with_indices, with_rank, input_columns, batched, *args, **kwargs)

    return filter_


def teach_map() -> None:
    """Wrap `datasets.Dataset.map`, for data sets with our columns alone."""
    wrap_once(datasets.Dataset, "map", _mapping)


def _mapping(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def map_(self: Any, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(self, function, *args, **kwargs).arguments
        removed, features = given.get("remove_columns") or (), given.get("features") or self.features
        kept = set(tensor_columns(features))
        columns = tuple(
            Column(name, self.features[name].name, self.features[name].content_id)
            for name in tensor_columns(self.features)
            if name in kept
        )
        if columns and function is not None and not inspect.iscoroutinefunction(function):
            function = Restoring(function, columns, (removed,) if isinstance(removed, str) else tuple(removed))
        return original(self, function, *args, **kwargs)

    return map_
