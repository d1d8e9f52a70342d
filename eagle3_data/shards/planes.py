"""bf16 in two planes: sign and mantissa as they are, exponents compressed. Lossless.

A bfloat16 is s eeeeeeee mmmmmmm. The exponents of hidden states take few values (about 3 bits of information), signs
and mantissas are noise, so only the exponents go through zstd. They are cut into frames of `FRAME_VALUES`,
each compressed alone, so that threads share the work of one tensor; a frame that would grow is kept as it is, and then
its size is its number of values. The same values give the same bytes with the same zstd.
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
    """(bytes of each frame, mantissa plane [N], frames) of bfloat16 bits [N]."""
    codec = pa.Codec("zstd", compression_level=ZSTD_LEVEL)
    mantissa, frames = np.empty(len(values), np.uint8), []
    for low in range(0, len(values), FRAME_VALUES):
        part = values[low : low + FRAME_VALUES]
        mantissa[low : low + len(part)] = (part & 0x7F) | (part >> 8 & 0x80)
        exponent = (part >> 7).astype(np.uint8)
        packed = codec.compress(exponent)
        frames.append(packed if packed.size < len(exponent) else pa.py_buffer(exponent))
    return np.array([frame.size for frame in frames], np.int32), mantissa, frames


def join_planes(sizes: I32, mantissa: U8, exponent: U8, out: U16) -> None:
    """The inverse, into `out` [N]. Raises ShardCorrupt when the frames do not give N exponents."""
    count = len(out)
    ends = np.cumsum(sizes, dtype=np.int64)
    if len(sizes) != frame_count(count) or len(mantissa) != count or (sizes <= 0).any():
        raise ShardCorrupt(f"{len(sizes)} exponent frames and {len(mantissa)} mantissas for {count} values")
    if count and ends[-1] > len(exponent):
        raise ShardCorrupt(f"exponent frames take {ends[-1]} bytes, {len(exponent)} are there")

    def join(number: int) -> None:
        low = number * FRAME_VALUES
        high = min(low + FRAME_VALUES, count)
        end = int(ends[number])
        _join_frame(exponent[end - int(sizes[number]) : end], mantissa[low:high], out[low:high])

    if len(sizes) < PARALLEL_FROM or _threads() == 1:
        for number in range(len(sizes)):
            join(number)
        return
    for _ in _pool(os.getpid()).map(join, range(len(sizes))):
        pass


def _join_frame(packed: U8, mantissa: U8, out: U16) -> None:
    exponent = _unpack(packed, len(out))
    scratch = np.empty(PIECE_VALUES, np.int16)
    for low in range(0, len(out), PIECE_VALUES):
        piece = out[low : low + PIECE_VALUES]
        low_bits = scratch[: len(piece)]
        # sign extension puts the sign into bit 15 (and above the mantissa, where the mask drops it)
        np.copyto(low_bits, mantissa[low : low + PIECE_VALUES].view(np.int8))
        np.bitwise_and(low_bits, np.int16(-0x7F81), out=low_bits)
        np.copyto(piece, exponent[low : low + PIECE_VALUES])
        np.left_shift(piece, 7, out=piece)
        np.bitwise_or(piece, low_bits.view(np.uint16), out=piece)


def _unpack(packed: U8, count: int) -> U8:
    if len(packed) == count:
        return packed
    try:
        data = pa.Codec("zstd").decompress(packed, decompressed_size=count)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ShardCorrupt(f"an exponent frame does not decompress: {error}") from error
    if data.size != count:
        raise ShardCorrupt(f"an exponent frame gives {data.size} of {count} values")
    return np.frombuffer(data, np.uint8)


def _threads() -> int:
    return min(8, len(os.sched_getaffinity(0)))


@functools.lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """One per process: threads do not survive a fork."""
    return ThreadPoolExecutor(_threads(), thread_name_prefix="eagle3-planes")
