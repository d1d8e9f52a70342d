"""What local and remote shards have in common: the manifest, the index, and the names of columns."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from eagle3_data.capture import TOP_IDS, TOP_LOGPROBS, CaptureSpec
from eagle3_data.errors import ConfigError
from eagle3_data.manifest import Manifest
from eagle3_data.protocol import AUX, IDS, LAST, MASK

COLUMNS = (AUX, LAST, TOP_IDS, TOP_LOGPROBS, IDS, MASK)


class SampleTable(abc.ABC):
    """Samples of one build in the order of its shards.

    `tokens`: int32 [N]; `capture`: the CaptureSpec; `fingerprint`: names the content; `read(i)`: tensors of sample i.
    """

    def __init__(self, where: str, manifest: Manifest, index: pa.Table) -> None:
        self.where, self.manifest, self.index = where, manifest, index
        self.tokens: npt.NDArray[np.int32] = index.column("tokens").to_numpy()
        self.offsets: npt.NDArray[np.int64] = index.column("offset").to_numpy()
        self.nbytes: npt.NDArray[np.int64] = index.column("nbytes").to_numpy()
        shards = index.column("shard").combine_chunks().dictionary_encode()
        self._codes: list[int] = shards.indices.to_pylist()
        self._names: list[str] = shards.dictionary.to_pylist()

    @abc.abstractmethod
    def read(self, i: int, columns: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Tensors of sample `i`; only the named columns are read.

        aux_hidden_states [T, L*W] and last_hidden_state [T, W] in the capture dtype, input_ids int32 [T],
        loss_mask uint8 [T]; with `--last topk:K` topk_ids int32 [T, K] and topk_logprobs float16 [T, K] instead.
        Raises ShardCorrupt when the bytes are not such a sample, ConfigError for a column that
        the data set does not have.
        """

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def keys(self) -> list[str]:
        keys: list[str] = self.index.column("key").to_pylist()
        return keys

    @property
    def capture(self) -> CaptureSpec:
        return self.manifest.spec

    @property
    def fingerprint(self) -> str:
        return self.manifest.content_id

    @property
    def columns(self) -> tuple[str, ...]:
        present = {name for name, _, _ in self.capture.tensors(1)}
        return tuple(name for name in COLUMNS if name in present)

    def shard_of(self, i: int) -> str:
        return self._names[self._codes[i]]

    @functools.cached_property
    def _rows(self) -> dict[str, range]:
        edges = np.flatnonzero(np.diff(self._codes, prepend=-1, append=-1)).tolist()
        return {self.shard_of(low): range(low, high) for low, high in itertools.pairwise(edges)}

    def rows_of(self, shard: str) -> range:
        """The samples of one shard; they stand together."""
        return self._rows[shard]

    def wanted(self, columns: Sequence[str] | None) -> Sequence[str]:
        """`columns`, checked; all when None. Raises ConfigError for one that is not here."""
        for name in columns or ():
            if name not in self.columns:
                raise ConfigError(f"no column {name!r} in {self.where}; it has {', '.join(self.columns)}")
        return self.columns if columns is None else columns
