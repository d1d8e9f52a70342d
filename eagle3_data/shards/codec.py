"""Between the states of a dump and what a shard stores for them, both ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import ConfigError, ShardCorrupt
from eagle3_data.shards.fp8 import from_fp8, to_fp8
from eagle3_data.shards.planes import join_planes, split_planes
from eagle3_data.shards.stored import PAD, StateColumn, padded, part_names, state_columns

if TYPE_CHECKING:
    from eagle3_data.head import TargetHead


@dataclass(frozen=True, slots=True)
class Encoded:
    """`parts`: the stored state tensors' bytes, in file order; `packed`: padded bytes of each plane of high bytes."""

    parts: list[Any]
    packed: tuple[int, ...]


def encode(spec: CaptureSpec, tokens: int, aux: memoryview, last: memoryview, head: TargetHead | None) -> Encoded:
    """`aux` and `last`: bytes of the dump's states [T, L*W] and [T, W]. Nothing is read past the call."""
    parts: list[Any] = []
    packed: list[int] = []
    for column, source in zip(state_columns(spec), (aux, last), strict=False):
        if column.encoding == "bf16":
            parts.append(source)
        elif column.encoding == "fp8":
            parts += _fp8_parts(spec, tokens, column, source)
        else:
            sizes, low, frames = split_planes(np.frombuffer(source, np.uint16))
            fill = bytes(-int(sizes.sum()) % PAD)
            parts += [_bytes_of(sizes), _bytes_of(low), *frames, fill]
            packed.append(padded(int(sizes.sum())))
    if spec.top_k:
        if head is None:
            raise ConfigError(f"--last {spec.last} needs the target's head", next="--head: the target's checkpoint")
        ids, logprobs = head.top(_tensor(last, spec.dtype).view(tokens, spec.width), spec.top_k)
        parts += [_bytes_of(ids.numpy()), _bytes_of(logprobs.numpy())]
    return Encoded(parts, tuple(packed))


def decode(spec: CaptureSpec, column: str, stored: Mapping[str, Tensor]) -> Tensor:
    """The column as `CaptureSpec.tensors` says, from its stored tensors. Raises ShardCorrupt."""
    for state in state_columns(spec):
        if state.name != column or state.encoding == "bf16":
            continue
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if state.encoding == "fp8":
            scale, values = stored[f"{column}.scale"], stored[f"{column}.fp8"]
            if (scale.dtype, values.dtype) != (torch.float32, torch.float8_e4m3fn):
                raise ShardCorrupt(f"{column}: {scale.dtype} scales for {values.dtype} values")
            if scale.shape[1:] != (state.groups,) or values.shape != (len(scale), state.groups * spec.width):
                raise ShardCorrupt(f"{column}: scales {list(scale.shape)} for values {list(values.shape)}")
            return from_fp8(scale, values, dtype)
        frames, low, high = (stored[name] for name in part_names(spec, column))
        if (frames.dtype, low.dtype, high.dtype) != (torch.int32, torch.uint8, torch.uint8):
            raise ShardCorrupt(f"{column}: planes of {frames.dtype}, {low.dtype}, {high.dtype}")
        if frames.ndim != 1 or high.ndim != 1:
            raise ShardCorrupt(f"{column}: planes {list(frames.shape)}, {list(high.shape)} are not flat")
        out = torch.empty(low.shape, dtype=torch.bfloat16)
        join_planes(
            frames.numpy(),
            low.reshape(-1).numpy(),
            high.numpy(),
            out.view(torch.int16).reshape(-1).numpy().view(np.uint16),
        )
        return out
    return stored[column]


def _fp8_parts(spec: CaptureSpec, tokens: int, column: StateColumn, source: memoryview) -> Iterator[memoryview]:
    scale, values = to_fp8(_tensor(source, spec.dtype).view(tokens, column.groups, spec.width))
    yield _bytes_of(scale.numpy())
    yield _bytes_of(values.view(torch.uint8).numpy())


def _tensor(source: memoryview, dtype: str) -> Tensor:
    """A flat view; the mapping is private or read-only, and nobody writes into it."""
    kind: torch.dtype = getattr(torch, dtype)
    return torch.frombuffer(source, dtype=kind)


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def part_bytes(parts: Sequence[Any]) -> int:
    return sum(memoryview(part).nbytes for part in parts)
