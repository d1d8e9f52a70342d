"""Random access to sealed shards by mmap: tensors are views of the page cache, nothing is copied or unpickled."""

from __future__ import annotations

import functools
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import ShardCorrupt
from eagle3_data.hub.notes import mirrored_shards
from eagle3_data.manifest import Manifest
from eagle3_data.shards.codec import decode
from eagle3_data.shards.far import FarShards
from eagle3_data.shards.index import read_index
from eagle3_data.shards.layout import header_bytes, load_object
from eagle3_data.shards.stored import part_names, stored_plainly
from eagle3_data.shards.table import SampleTable

if TYPE_CHECKING:
    from eagle3_data.shards.cache import CacheConfig
    from eagle3_data.shards.sources import Access

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "U8": torch.uint8,
}
MAX_HEADER_BYTES = 1 << 20
KEPT_HEADER_BYTES = 2048
"""Headers up to this size are parsed once and remembered; ours have 512 bytes."""
Layout = dict[str, tuple[torch.dtype, list[int], int, int]]
"""{name: (dtype, shape, start, end)} of a safetensors member, bytes from its start."""


def _read_header(data: bytes | bytearray | memoryview, nbytes: int) -> tuple[dict[str, Any], int]:
    """The header's JSON object and its size in bytes."""
    if nbytes < 8 or len(data) < 8:
        raise ShardCorrupt("safetensors member is shorter than its length prefix")
    (size,) = struct.unpack_from("<Q", data)
    if size > min(MAX_HEADER_BYTES, nbytes - 8, len(data) - 8):
        raise ShardCorrupt(f"safetensors header claims {size} bytes in a member of {nbytes}")
    try:
        return load_object(bytes(data[8 : 8 + size])), size
    except ValueError as error:
        raise ShardCorrupt(f"safetensors header is malformed: {error}") from error


def read_metadata(data: bytes | memoryview) -> dict[str, str]:
    """`__metadata__` of a safetensors file that starts with `data`; empty when there is none. Raises ShardCorrupt."""
    metadata = _read_header(data, len(data))[0].get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ShardCorrupt("safetensors metadata is not a map of strings")
    return metadata


def _entry(name: str, entry: dict[str, Any]) -> tuple[int, int, str, str, list[int]]:
    """(start, end, name, dtype, shape) of one tensor. Raises KeyError, ValueError, TypeError."""
    (low, high), shape = entry["data_offsets"], entry["shape"]
    if not all(type(number) is int for number in (low, high, *shape)):
        raise ValueError(f"offsets and shape of {name} are not whole numbers")
    if entry["dtype"] not in TORCH_DTYPES:
        raise ValueError(f"dtype {entry['dtype']!r} of {name}")
    return low, high, name, str(entry["dtype"]), list(shape)


def parse_header(data: bytes | bytearray | memoryview, nbytes: int) -> Layout:
    """What lies where in the safetensors member `data[:nbytes]`, of which `data` may be the head alone.

    Raises ShardCorrupt unless the tensors have known dtypes, the sizes of their shapes, and fill the member without
    gaps or overlaps; a file from a mirror is not trusted.
    """
    if len(data) >= 8:
        (size,) = struct.unpack_from("<Q", data)
        if 8 + size <= min(KEPT_HEADER_BYTES, len(data)):
            return _parse_kept(bytes(data[: 8 + size]), nbytes)  # samples of one length have the same header
    return _parse(data, nbytes)


@functools.lru_cache(maxsize=4096)
def _parse_kept(head: bytes, nbytes: int) -> Layout:
    return _parse(head, nbytes)


def _parse(data: bytes | bytearray | memoryview, nbytes: int) -> Layout:
    header, size = _read_header(data, nbytes)
    try:
        entries = sorted(_entry(name, entry) for name, entry in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardCorrupt(f"safetensors header is malformed: {error!r}") from error
    base, end, tensors = 8 + size, 0, {}
    for low, high, name, kind, shape in entries:
        dtype = TORCH_DTYPES[kind]
        count = dtype.itemsize
        for n in shape:
            count *= n
        if low != end or high - low != count or min(shape, default=0) < 0:
            raise ShardCorrupt(f"tensor {name}: offsets {low}..{high} do not fit its shape {shape} or its neighbours")
        tensors[name] = (dtype, shape, base + low, base + high)
        end = high
    if base + end != nbytes:
        raise ShardCorrupt(f"safetensors member has {nbytes} bytes, its tensors need {base + end}")
    return tensors


def tensors_at(
    buffer: mmap.mmap | memoryview, offset: int, nbytes: int, columns: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The named tensors of the member at `offset`, as views of `buffer`. Raises ShardCorrupt."""
    if offset < 0 or offset + nbytes > len(buffer):
        raise ShardCorrupt(f"member at {offset} with {nbytes} bytes lies outside a shard of {len(buffer)} bytes")
    with memoryview(buffer) as whole, whole[offset : offset + nbytes] as member:
        layout = parse_header(member, nbytes)
    tensors = {}
    for name in columns:
        if name not in layout:
            raise ShardCorrupt(f"no tensor {name}")
        dtype, shape, low, high = layout[name]
        count = (high - low) // dtype.itemsize
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset + low) if count else torch.empty(0)
        tensors[name] = flat.to(dtype).reshape(shape)
    return tensors


def view_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of any dtype, writable."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def columns_at(
    buffer: mmap.mmap | memoryview, offset: int, nbytes: int, columns: Sequence[str], spec: CaptureSpec
) -> dict[str, torch.Tensor]:
    """The named columns of the member at `offset`, decoded: views of `buffer` where they are stored plainly.

    Raises ShardCorrupt.
    """
    names = [part for column in columns for part in part_names(spec, column)]
    stored = tensors_at(buffer, offset, nbytes, names)
    return {column: decode(spec, column, stored) for column in columns}


@functools.lru_cache(maxsize=256)
def map_shard(path: str, size: int, mtime_ns: int) -> mmap.mmap:
    """A private mapping: writes into a returned tensor stay in this process (and torch does not warn)."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class ShardSet(SampleTable):
    """The sealed samples of one build folder. Pickles as the folder and the index; mappings are made per process.

    Shards that a push removed after their mirror had confirmed them are read from there (`far.py`).
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        index: pa.Table,
        cache: CacheConfig | None = None,
        access: Access | None = None,
    ) -> None:
        super().__init__(str(folder), manifest, index)
        self.folder, self._cache, self._access = folder, cache, access
        self._data = f"{folder}/data/"
        self._far = FarShards(folder, manifest, index, cache, access)

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], cache: CacheConfig | None = None, access: Access | None = None
    ) -> ShardSet:
        """A finished or growing build. Raises ConfigError when it is none, ShardCorrupt when the index is short.

        `cache`, `access`: for shards that only a mirror has.
        """
        path = Path(folder)
        manifest = Manifest.load(path)
        return cls(path, manifest, read_index(path, manifest), cache, access)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardSet, (self.folder, self.manifest, self.index, self._cache, self._access)

    @functools.cached_property
    def far_shards(self) -> dict[str, str]:
        """Shards that were not here when it was first asked: name -> URL of the mirror that has it, or ''."""
        known = mirrored_shards(self.folder)
        names = (row.name for row in self.manifest.shards)
        return {name: known.get(name, "") for name in names if not (self.folder / "data" / name).exists()}

    @property
    def remote(self) -> bool:
        return bool(self.far_shards)

    def check_far(self) -> str:
        """Where the shards are read that are not here, in words. Raises ShardCorrupt when nothing says where."""
        for name, url in self.far_shards.items():
            if not url:
                self._far.table(name)  # raises
        urls = ", ".join(sorted(set(self.far_shards.values())))
        return f"{len(self.far_shards):,} of {len(self.manifest.shards):,} shards are read from {urls}"

    def read(self, i: int, columns: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Views of the mapped shard; only the pages of the named columns are touched."""
        wanted = self.wanted(columns)
        name = self.shard_of(i)
        path = f"{self._data}{name}"
        try:
            stat = os.stat(path)
            buffer = map_shard(path, stat.st_size, stat.st_mtime_ns)
            tensors = columns_at(buffer, int(self.offsets[i]), int(self.nbytes[i]), wanted, self.capture)
            return self.checked(i, tensors)
        except FileNotFoundError:
            return self._far.table(name).read(i, columns)
        except ShardCorrupt as error:
            raise ShardCorrupt(f"{name}, sample {self.keys[i]}: {error.message}") from error

    def read_into(self, i: int, out: Mapping[str, torch.Tensor]) -> None:
        """From the file into `out` without a mapping: no page faults, and as fast as the file can be read.

        Encoded columns are decoded first and then copied.
        """
        if not stored_plainly(self.capture, out):
            super().read_into(i, out)
            return
        self._check_out(i, out)
        shard, start, nbytes = self.shard_of(i), int(self.offsets[i]), int(self.nbytes[i])
        try:
            file = os.open(f"{self._data}{shard}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._far.table(shard).read_into(i, out)
            return
        try:
            layout = parse_header(os.pread(file, min(header_bytes(self.capture), nbytes), start), nbytes)
            for name, target in out.items():
                _read_rows(file, layout, name, start, target)
        except ShardCorrupt as error:
            raise ShardCorrupt(f"{shard}, sample {self.keys[i]}: {error.message}") from error
        finally:
            os.close(file)


def _read_rows(file: int, layout: Layout, name: str, start: int, target: torch.Tensor) -> None:
    """The first rows of one tensor, as many as `target` has."""
    if name not in layout:
        raise ShardCorrupt(f"no tensor {name}")
    dtype, shape, low, _ = layout[name]
    if target.dtype != dtype or target.shape[1:] != torch.Size(shape[1:]) or len(target) > shape[0]:
        raise ShardCorrupt(f"{name} is {dtype} {shape}, the manifest says otherwise")
    view, offset = view_of(target), start + low
    while view:
        count = os.preadv(file, [view], offset)
        if not count:
            raise ShardCorrupt(f"the shard ends before {name} does")
        view, offset = view[count:], offset + count
