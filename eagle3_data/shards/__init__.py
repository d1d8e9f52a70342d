"""Shards: layout, writer, reader, index. Names load on first use, so that listing them imports nothing heavy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3_data.shards.reader import ShardSet
    from eagle3_data.shards.remote import RemoteShardSet, open_samples
    from eagle3_data.shards.table import COLUMNS
    from eagle3_data.shards.writer import OpenShard, Place

__all__ = ["COLUMNS", "OpenShard", "Place", "RemoteShardSet", "ShardSet", "open_samples"]
_HOMES = {
    "COLUMNS": "table",
    "OpenShard": "writer",
    "Place": "writer",
    "RemoteShardSet": "remote",
    "ShardSet": "reader",
    "open_samples": "remote",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
