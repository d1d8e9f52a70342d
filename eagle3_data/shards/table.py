"""What local and remote shards have in common: the manifest, the index, and the names of columns."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from eagle3_data.capture import TOP_IDS, TOP_LOGPROBS, Alignment, CaptureSpec
from eagle3_data.errors import ConfigError, ShardCorrupt
from eagle3_data.manifest import Manifest
from eagle3_data.protocol import AUX, IDS, LAST, MASK

COLUMNS = (AUX, LAST, TOP_IDS, TOP_LOGPROBS, IDS, MASK)


def check_index(index: pa.Table, manifest: Manifest) -> pa.Table:
    """`index`, if every row lies inside its shard and every shard has its rows. Raises ShardCorrupt: not trusted."""
    sizes = {row.name: (row.nbytes, row.samples) for row in manifest.shards}
    names = index.column("shard").combine_chunks().dictionary_encode()
    known = names.dictionary.to_pylist()
    if index.num_rows == 0 and not sizes:
        return index
    if any(column.null_count for column in index.columns):
        raise ShardCorrupt("the index has empty fields", next="eagle3-data verify")
    if set(known) != set(sizes):
        odd = sorted(set(known) ^ set(sizes))[0]
        raise ShardCorrupt(f"index and manifest disagree about shard {odd}", next="eagle3-data verify")
    codes = names.indices.to_numpy()
    ends = np.array([sizes[name][0] for name in known], np.int64)[codes]
    offset, nbytes, tokens = (index.column(name).to_numpy() for name in ("offset", "nbytes", "tokens"))
    bad = (offset < 0) | (nbytes <= 0) | (nbytes > ends) | (offset > ends - nbytes) | (tokens <= 0)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ShardCorrupt(
            f"index: sample {index.column('key')[row].as_py()} lies outside its shard", next="eagle3-data verify"
        )
    counts, jumps = np.bincount(codes, minlength=len(known)), np.count_nonzero(np.diff(codes))
    if jumps != len(known) - 1 or any(counts[i] != sizes[name][1] for i, name in enumerate(known)):
        raise ShardCorrupt("index: the samples of a shard do not stand together, or are not all there")
    return index


class SampleTable(abc.ABC):
    """Samples of one build in the order of its shards.

    `tokens`: int32 [N]; `capture`: the CaptureSpec; `fingerprint`: names the content; `read(i)`: tensors of sample i.
    """

    def __init__(self, where: str, manifest: Manifest, index: pa.Table) -> None:
        self.where, self.manifest, self.index = where, manifest, check_index(index, manifest)
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

    def expect(self, samples: Sequence[int]) -> None:  # noqa: B027 - nothing to do is right for most
        """Told by a reader what it will read, in order. All samples are here, so there is nothing to do."""

    @property
    def remote(self) -> bool:
        """Whether samples come through the network, so that it pays to fetch them before they are asked for."""
        return False

    def read_into(self, i: int, out: Mapping[str, torch.Tensor]) -> None:
        """Put sample `i` into memory of the caller's: `out[name]` takes the first `len(out[name])` of its rows.

        The tensors must be contiguous, of the sample's dtypes and widths, and no longer than the sample. Raises as
        `read` does.
        """
        self._check_out(i, out)
        for name, tensor in self.read(i, tuple(out)).items():
            out[name].copy_(tensor[: len(out[name])])

    def _check_out(self, i: int, out: Mapping[str, torch.Tensor]) -> None:
        self.wanted(tuple(out))
        stored = {name: (dtype, shape) for name, dtype, shape in self.capture.tensors(int(self.tokens[i]))}
        for name, tensor in out.items():
            dtype, shape = stored[name]
            fits = tensor.dtype == getattr(torch, dtype) and tensor.shape[1:] == torch.Size(shape[1:])
            if not fits or len(tensor) > shape[0] or not tensor.is_contiguous():
                raise ConfigError(
                    f"{name} of sample {self.keys[i]} is {dtype} {list(shape)}; it does not go into "
                    f"{'' if tensor.is_contiguous() else 'strided '}{tensor.dtype} {list(tensor.shape)}"
                )

    def checked(self, i: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`tensors`, if they are what the manifest says of sample `i`. Raises ShardCorrupt."""
        for name, dtype, shape in self.capture.tensors(int(self.tokens[i])):
            found = tensors.get(name)
            if found is not None and (found.dtype != getattr(torch, dtype) or tuple(found.shape) != shape):
                raise ShardCorrupt(
                    f"{name} is {found.dtype} {list(found.shape)}, the manifest says {dtype} {list(shape)}"
                )
        return tensors

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def keys(self) -> list[str]:
        keys: list[str] = self.index.column("key").to_pylist()
        return keys

    @functools.cached_property
    def capture(self) -> CaptureSpec:
        return self.manifest.spec

    @property
    def alignment(self) -> Alignment:
        return self.manifest.alignment

    @property
    def fingerprint(self) -> str:
        return self.manifest.content_id

    @functools.cached_property
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
