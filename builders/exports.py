"""`save_to_disk` and `push_to_hub` of our data sets are refused: they would write row numbers and leave the states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import datasets

from eagle3_data.builders.tensors import StateTensor
from eagle3_data.errors import ConfigError

BETTER = {
    "save_to_disk": (
        "the build's folder is the copy on disk (cp -r it, or `eagle3-data pull`); select_columns() of the other "
        "columns can be saved"
    ),
    "push_to_hub": "eagle3-data push FOLDER ORG/NAME: shards, index and card, readable without this package",
    "to_parquet": "the tar shards are the portable format; select_columns() of the other columns can be written",
}


def refuse_exports() -> None:
    """Wrap the three methods of `datasets.Dataset` (and of the dict), for data sets with our columns alone."""
    for method in BETTER:
        for owner in (datasets.Dataset, datasets.DatasetDict):
            if hasattr(owner, method):
                _wrap(owner, method)


def _wrap(owner: Any, method: str) -> None:
    original: Callable[..., Any] = getattr(owner, method)
    if getattr(original, "_eagle3_data", False):
        return

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        parts = self.values() if isinstance(self, dict) else (self,)
        columns = [name for part in parts for name, kind in part.features.items() if isinstance(kind, StateTensor)]
        if columns:
            raise ConfigError(f"{method} would not take {', '.join(columns)} with it", next=BETTER[method])
        return original(self, *args, **kwargs)

    checked._eagle3_data = True  # type: ignore[attr-defined]
    setattr(owner, method, checked)
