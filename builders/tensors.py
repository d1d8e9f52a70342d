"""The feature behind the tensor columns: Arrow holds a row number, the tensor is read when somebody looks at it.

So `select_columns`, `filter`, `shuffle` (its buffer, too), `map` and `with_format("torch")` cost nothing for columns
that are not looked at, and no tensor is ever written into the Arrow cache. Like `datasets.Image`, it is decoded on
access; unlike it, the bytes stay in their shard.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from datasets.features.features import register_feature

from eagle3_data.errors import ConfigError
from eagle3_data.protocol import IDS, MASK
from eagle3_data.shards.ahead import ReadAhead
from eagle3_data.shards.cache import CacheConfig
from eagle3_data.shards.reader import ShardSet
from eagle3_data.shards.remote import RemoteShardSet
from eagle3_data.shards.sources import Access
from eagle3_data.shards.table import SampleTable

FEATURE = "Eagle3StateTensor"
_ARRAY = {"bfloat16": "float32"}
"""Dtype of the array that `datasets` makes of a tensor, where it is another: NumPy has no bf16."""
ORIGIN = "_eagle3_origin"
"""Attribute of a tensor that came from a shard: (content id, column, row, its count of changes in place by then).

A plain tuple: it is saved with the tensor, and must not stand in the way of `torch.load`."""


def refusal(column: str) -> ConfigError:
    return ConfigError(
        f"column {column} holds tensors that lie in shards; a changed one cannot go there",
        next="return it under another name, leave it out of what you return, or change it after loading "
        "(in the collate function)",
    )


def tensor_columns(features: Mapping[str, Any] | None) -> list[str]:
    """Names of our columns; a stream that went through `map` has no features, and holds values."""
    return [name for name, kind in (features or {}).items() if isinstance(kind, StateTensor)]


@dataclass(frozen=True)
class Place:
    """Where tensors are read. `content_id` keeps a grown or replaced build from being read through an old index."""

    location: str
    """A folder, or the URL of a mirror at one commit."""
    content_id: str
    cache_dir: str = ""
    cache_bytes: int = 0
    access: Access = field(default_factory=Access, repr=False)

    def table(self) -> SampleTable:
        return _open(self, os.getpid())

    def ahead(self) -> ReadAhead:
        return _ahead(self, os.getpid())

    def column(self, name: str, dtype: str) -> StateTensor:
        feature = StateTensor(name, dtype, self.location, self.content_id, self.cache_dir, self.cache_bytes)
        feature.access = self.access
        return feature


@lru_cache(maxsize=16)
def _open(place: Place, _pid: int) -> SampleTable:
    cache = CacheConfig(Path(place.cache_dir), place.cache_bytes) if place.cache_dir else None
    if Path(place.location).is_absolute():
        table: SampleTable = ShardSet.open(place.location, cache, place.access)
    else:
        table = RemoteShardSet.open(place.location, cache=cache, access=place.access)
    if table.fingerprint != place.content_id:
        raise ConfigError(f"{place.location} has changed since it was loaded", next="call load_dataset again")
    return table


@lru_cache(maxsize=16)
def _ahead(place: Place, pid: int) -> ReadAhead:
    return ReadAhead(_open(place, pid))


@dataclass
class StateTensor:
    """A column of tensors: bf16 stays bf16. Its fields are what `datasets` writes into caches: no secrets."""

    name: str
    dtype: str
    location: str = ""
    content_id: str = ""
    cache_dir: str = ""
    cache_bytes: int = 0
    id: str | None = field(default=None, repr=False)
    _type: str = field(default=FEATURE, init=False, repr=False)
    pa_type: ClassVar[Any] = pa.int64()

    def __post_init__(self) -> None:
        self.access = Access()  # no field: it pickles with the data set, and is never written into a cache
        self.decode = True

    def __call__(self) -> pa.DataType:
        return self.pa_type

    def stored(self) -> StateTensor:
        """The same column, showing what is stored: a row number, or in a stream an array."""
        column = copy.copy(self)
        column.decode = False  # what `datasets` asks features for
        return column

    @property
    def place(self) -> Place:
        return Place(self.location, self.content_id, self.cache_dir, self.cache_bytes, self.access)

    def encode_example(self, value: Any) -> int | npt.NDArray[Any]:
        """The row of a tensor that came from here. Raises ConfigError for any other, a changed one too.

        A stream that renames columns shows us its tensors as arrays (`datasets` makes them): those stay values, and
        `decode_example` makes tensors of them again. Into Arrow they do not go: `cast_storage`.
        """
        if isinstance(value, torch.Tensor):
            content_id, name, row, version = getattr(value, ORIGIN, ("", "", -1, -1))
            if (content_id, name, version) == (self.content_id, self.name, value._version):
                return int(row)
        elif isinstance(value, np.ndarray) and value.ndim:
            cast = value.astype(_ARRAY.get(self.dtype, self.dtype), copy=False)
            if cast is value or np.array_equal(cast, value):  # whole numbers of another width, unharmed
                return cast
        elif hasattr(value, "__index__"):
            return int(value)
        raise refusal(self.name)

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        """Row numbers stay; anything else would be a copy of states. Raises ConfigError."""
        if pa.types.is_integer(storage.type) or pa.types.is_null(storage.type):
            return storage.cast(self.pa_type)
        raise refusal(self.name)

    def decode_example(self, value: Any, token_per_repo_id: Mapping[str, Any] | None = None) -> torch.Tensor:
        """The tensor; a view of the mapped shard when that is on this machine."""
        if isinstance(value, np.ndarray) and value.ndim:
            return torch.from_numpy(value).to(getattr(torch, self.dtype))
        if not self.location:
            raise ConfigError(f"column {self.name} has lost its shards", next="load the data set with load_dataset")
        row, place = int(value), self.place
        table = place.table()
        tensor = place.ahead().take(row, self.name) if table.remote else table.read(row, (self.name,))[self.name]
        if self.name in (IDS, MASK):
            tensor = tensor.clone()  # small, and people change them in place
        setattr(tensor, ORIGIN, (self.content_id, self.name, row, tensor._version))
        return tensor


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # "experimental": held by the tests on both supported generations
    register_feature(StateTensor, FEATURE)
