"""Exports that would write or give row numbers in the place of our tensors are refused, with the better way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import datasets

from eagle3_data.builders.tensors import tensor_columns
from eagle3_data.builders.wrapping import wrap_once
from eagle3_data.errors import ConfigError
from eagle3_data.protocol import IDS

PLAIN = (
    "iterate to have the tensors; for a table make lists of what belongs in one, "
    "map(lambda row: {{'values': row['{column}'].tolist()}}, remove_columns=[{columns}]), "
    "or take select_columns() of the other columns"
)
BETTER = {
    "save_to_disk": (
        "the build's folder is the copy on disk (cp -r it, or `eagle3-data pull`); select_columns() of the other "
        "columns can be saved"
    ),
    "push_to_hub": "eagle3-data push FOLDER ORG/NAME: shards, index and card, readable without this package",
    "to_parquet": "the tar shards are the portable format; select_columns() of the other columns can be written",
    **dict.fromkeys(("to_csv", "to_dict", "to_json", "to_list", "to_pandas", "to_polars", "to_sql"), PLAIN),
}
OWNERS = (datasets.Dataset, datasets.DatasetDict, datasets.IterableDataset, datasets.IterableDatasetDict)
BY_COLUMN = {"sort": "column_names", "unique": "column"}
"""Methods of `Dataset` that look into the stored values of the columns that they are given."""


def refuse_exports() -> None:
    """Wrap these methods of data sets and streams (and of the dicts), for those with our columns alone."""
    for method in BETTER:
        for owner in OWNERS:
            if hasattr(owner, method):
                wrap_once(owner, method, functools.partial(_refusing, method))
    for method in BY_COLUMN:
        wrap_once(datasets.Dataset, method, functools.partial(_refusing_by_column, method))


def _ours(data: Any) -> list[str]:
    parts = data.values() if isinstance(data, dict) else (data,)
    return list(dict.fromkeys(name for part in parts for name in tensor_columns(part.features)))


def _refusing(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        columns = _ours(self)
        if columns:
            column = IDS if IDS in columns else columns[0]
            better = BETTER[method].format(column=column, columns=", ".join(map(repr, columns)))
            raise ConfigError(f"{method} would give row numbers for {', '.join(columns)}", next=better)
        return original(self, *args, **kwargs)

    return checked


def _refusing_by_column(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = args[0] if args else kwargs.get(BY_COLUMN[method], ())
        found = [name for name in _ours(self) if name in ([asked] if isinstance(asked, str) else asked)]
        if found:
            raise ConfigError(
                f"{method} would go by the row numbers of {', '.join(found)}",
                next=f"make a column of what you want to go by: map(lambda row: {{'n': len(row['{found[0]}'])}})",
            )
        return original(self, *args, **kwargs)

    return checked
