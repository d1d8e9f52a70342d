"""bf16 in two planes of bytes: the low ones as they are, the high ones compressed. Lossless.

A bfloat16 is seeeeeee emmmmmmm. The exponents of hidden states take few values (about 3 bits of information), signs and
mantissas are noise, so only the high bytes go through zstd. That the sign is among them and the exponent's last bit is
not costs 0.1 % of the bytes, and the way back is one shift and one or instead of sign extension and masks. They are cut
into frames of `FRAME_VALUES`, each compressed alone, so that threads share the work of one tensor; a frame that would
grow is kept as it is, and then its size is its number of values. Equal values give equal bytes with the same zstd.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eagle3_data.errors import ShardCorrupt
from eagle3_data.shards.stored import FRAME_VALUES

PIECE_VALUES = 1 << 15
"""Values joined at once: source, scratch and result stay in the first-level caches."""
ZSTD_LEVEL = 1
PARALLEL_FROM = 4
"""Frames below which handing them to threads costs more than it gives."""
U8: TypeAlias = npt.NDArray[np.uint8]
U16: TypeAlias = npt.NDArray[np.uint16]
I32: TypeAlias = npt.NDArray[np.int32]


def frame_count(values: int) -> int:
    return -(-values // FRAME_VALUES)


def split_planes(values: U16) -> tuple[I32, U8, list[Any]]:
    """(bytes of each frame, low bytes [N], frames of high bytes) of bfloat16 bits [N]."""
    codec = pa.Codec("zstd", compression_level=ZSTD_LEVEL)
    frames = []
    for start in range(0, len(values), FRAME_VALUES):
        high = (values[start : start + FRAME_VALUES] >> 8).astype(np.uint8)
        packed = codec.compress(high)
        frames.append(packed if packed.size < len(high) else pa.py_buffer(high))
    return np.array([frame.size for frame in frames], np.int32), values.astype(np.uint8), frames


def join_planes(sizes: I32, low: U8, packed: U8, out: U16) -> None:
    """The inverse, into `out` [N]. Raises ShardCorrupt when the frames do not give N high bytes."""
    count = len(out)
    ends = np.cumsum(sizes, dtype=np.int64)
    if len(sizes) != frame_count(count) or len(low) != count or (sizes <= 0).any():
        raise ShardCorrupt(f"{len(sizes)} frames and {len(low)} low bytes for {count} values")
    if count and ends[-1] > len(packed):
        raise ShardCorrupt(f"frames take {ends[-1]} bytes, {len(packed)} are there")

    def join(number: int) -> None:
        values = slice(number * FRAME_VALUES, min((number + 1) * FRAME_VALUES, count))
        end = int(ends[number])
        _join_frame(packed[end - int(sizes[number]) : end], low[values], out[values])

    if len(sizes) < PARALLEL_FROM or _threads() == 1:
        for number in range(len(sizes)):
            join(number)
        return
    for _ in _pool(os.getpid()).map(join, range(len(sizes))):
        pass


def _join_frame(packed: U8, low: U8, out: U16) -> None:
    high = _unpack(packed, len(out))
    scratch = np.empty(PIECE_VALUES, np.uint16)
    for start in range(0, len(out), PIECE_VALUES):
        piece = out[start : start + PIECE_VALUES]
        low_bits = scratch[: len(piece)]
        # widened on its own: an `or` of two widths goes through numpy's small cast buffers
        np.copyto(low_bits, low[start : start + PIECE_VALUES])
        np.copyto(piece, high[start : start + PIECE_VALUES])
        np.left_shift(piece, 8, out=piece)
        np.bitwise_or(piece, low_bits, out=piece)


def _unpack(packed: U8, count: int) -> U8:
    if len(packed) == count:
        return packed
    try:
        data = pa.Codec("zstd").decompress(packed, decompressed_size=count)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ShardCorrupt(f"a frame does not decompress: {error}") from error
    if data.size != count:
        raise ShardCorrupt(f"a frame gives {data.size} of {count} values")
    return np.frombuffer(data, np.uint8)


def _threads() -> int:
    return min(8, len(os.sched_getaffinity(0)))


@functools.lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """One per process: threads do not survive a fork."""
    return ThreadPoolExecutor(_threads(), thread_name_prefix="eagle3-planes")
