"""A stream's `remove_columns` and `rename_columns`, with the tensors left where they are.

`datasets` maps whole rows for both: it would read every tensor, the removed ones too, and make arrays of them on the
way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets

from eagle3_data.builders.tensors import tensor_columns
from eagle3_data.builders.wrapping import wrap_once


def teach_streams() -> None:
    """Wrap both, for streams with our columns alone."""
    wrap_once(datasets.IterableDataset, "remove_columns", _removing)
    wrap_once(datasets.IterableDataset, "rename_columns", _renaming)


def _removing(original: Callable[..., Any]) -> Callable[..., Any]:
    def remove_columns(self: Any, column_names: str | list[str]) -> Any:
        if not tensor_columns(self.features):
            return original(self, column_names)
        removed = {column_names} if isinstance(column_names, str) else set(column_names)
        return self.select_columns([name for name in self.features if name not in removed])

    return remove_columns


def _renaming(original: Callable[..., Any]) -> Callable[..., Any]:
    def rename_columns(self: Any, column_mapping: dict[str, str]) -> Any:
        ours = tensor_columns(self.features)
        if not ours:
            return original(self, column_mapping)
        kinds = dict(self.features)
        stored = {**kinds, **{name: kinds[name].stored() for name in ours}}
        renamed = original(self.cast(datasets.Features(stored)), column_mapping)
        # as `datasets` does it: the columns are read, by these, after the renaming
        renamed._info.features = datasets.Features(
            {column_mapping.get(name, name): kind for name, kind in kinds.items()}
        )
        return renamed

    return rename_columns
