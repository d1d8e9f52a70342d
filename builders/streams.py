"""A stream's `remove_columns` and `rename_columns`, with the tensors left where they are.

`datasets` maps whole rows for both: it would read every tensor, the removed ones too, and make arrays of them on the
way.
"""

from __future__ import annotations

import functools
from typing import Any

import datasets

from eagle3_data.builders.tensors import StateTensor


def teach_streams() -> None:
    """Wrap both, for streams with our columns alone."""
    if getattr(datasets.IterableDataset.remove_columns, "_eagle3_data", False):
        return
    _wrap_remove()
    _wrap_rename()


def _has_ours(stream: Any) -> bool:
    return any(isinstance(kind, StateTensor) for kind in (stream.features or {}).values())


def _wrap_remove() -> None:
    original = datasets.IterableDataset.remove_columns

    @functools.wraps(original)
    def remove_columns(self: Any, column_names: str | list[str]) -> Any:
        if not _has_ours(self):
            return original(self, column_names)
        removed = {column_names} if isinstance(column_names, str) else set(column_names)
        return self.select_columns([name for name in self.features if name not in removed])

    remove_columns._eagle3_data = True  # type: ignore[attr-defined]
    datasets.IterableDataset.remove_columns = remove_columns


def _wrap_rename() -> None:
    original = datasets.IterableDataset.rename_columns

    @functools.wraps(original)
    def rename_columns(self: Any, column_mapping: dict[str, str]) -> Any:
        if not _has_ours(self):
            return original(self, column_mapping)
        kinds = dict(self.features)
        stored = {name: kind.stored() if isinstance(kind, StateTensor) else kind for name, kind in kinds.items()}
        renamed = original(self.cast(datasets.Features(stored)), column_mapping)
        # as `datasets` does it: the columns are read, by these, after the renaming
        renamed._info.features = datasets.Features(
            {column_mapping.get(name, name): kind for name, kind in kinds.items()}
        )
        return renamed

    datasets.IterableDataset.rename_columns = rename_columns
