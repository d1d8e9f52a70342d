"""Which tensors stand for a column in a shard: pure arithmetic, so that plans and readers agree without a byte of data.

| encoding | column `x` [T, G*W] is stored as |
| --- | --- |
| bf16 | `x` itself, in the dtype that the model ran in |
| fp8 | `x.scale` float32 [T, G], `x.fp8` float8_e4m3fn [T, G*W] |
| bf16-planes | `x.frames` int32 [C], `x.low` uint8 [T, G*W], `x.high` uint8 [bytes, padded to 64] |

G states (L aux layers, or the one last state) of width W. Only the size of a plane of high bytes depends on the
data; its room is then that of the plane before compression, which it never exceeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eagle3_data.capture import TOP_IDS, TOP_LOGPROBS, CaptureSpec, Encoding
from eagle3_data.protocol import AUX, IDS, LAST, MASK, tensor_bytes

FRAME_VALUES = 1 << 19
"""High bytes in a frame: large enough for zstd's tables to pay, small enough for threads and caches. Fixed."""
PAD = 64
Tensors = list[tuple[str, str, tuple[int, ...]]]
"""(name, dtype, shape) in file order."""


@dataclass(frozen=True, slots=True)
class StateColumn:
    """A column of states: G of them side by side in the dump."""

    name: str
    groups: int
    encoding: Encoding


def state_columns(spec: CaptureSpec) -> list[StateColumn]:
    columns = [StateColumn(AUX, len(spec.layers), spec.aux_encoding)]
    if spec.last == "hidden":
        columns.append(StateColumn(LAST, 1, spec.last_encoding))
    return columns


def part_names(spec: CaptureSpec, column: str) -> list[str]:
    """Names of the stored tensors of a column; the column itself when it is stored plainly."""
    for state in state_columns(spec):
        if state.name == column and state.encoding == "fp8":
            return [f"{column}.scale", f"{column}.fp8"]
        if state.name == column and state.encoding == "bf16-planes":
            return [f"{column}.frames", f"{column}.low", f"{column}.high"]
    return [column]


def stored_plainly(spec: CaptureSpec, columns: Iterable[str]) -> bool:
    """Whether each of the columns lies in the shard as it is read."""
    return all(part_names(spec, column) == [column] for column in columns)


def padded(nbytes: int) -> int:
    return nbytes + -nbytes % PAD


def stored_states(spec: CaptureSpec, tokens: int, packed: Sequence[int] | None = None) -> Tensors:
    """The state tensors; `packed`: padded bytes of each plane of high bytes, None: their room."""
    tensors: Tensors = []
    planes = iter(packed or ())
    for column in state_columns(spec):
        shape = (tokens, column.groups * spec.width)
        values, names = shape[0] * shape[1], part_names(spec, column.name)
        if column.encoding == "bf16":
            tensors.append((column.name, spec.dtype, shape))
        elif column.encoding == "fp8":
            tensors += [(names[0], "float32", (tokens, column.groups)), (names[1], "float8_e4m3fn", shape)]
        else:
            high = padded(values) if packed is None else next(planes)
            frames = -(-values // FRAME_VALUES)
            tensors += [(names[0], "int32", (frames,)), (names[1], "uint8", shape), (names[2], "uint8", (high,))]
    if spec.top_k:
        shape = (tokens, spec.top_k)
        tensors += [(TOP_IDS, "int32", shape), (TOP_LOGPROBS, "float16", shape)]
    return tensors


def stored_tensors(spec: CaptureSpec, tokens: int, packed: Sequence[int] | None = None) -> Tensors:
    """All tensors of a stored sample in file order."""
    return [*stored_states(spec, tokens, packed), (IDS, "int32", (tokens,)), (MASK, "uint8", (tokens,))]


def states_nbytes(spec: CaptureSpec, tokens: int, packed: Sequence[int] | None = None) -> int:
    return sum(tensor_bytes(dtype, shape) for _, dtype, shape in stored_states(spec, tokens, packed))
