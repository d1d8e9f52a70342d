"""Where every byte of a sample lies in a shard. Pure arithmetic: known from the token count alone, before capture.

One sample is one block of a USTAR archive (N tokens):

    512   tar header of {key}.json
    1024  JSON of `SampleRecord`, padded with spaces
    512   tar header of {key}.safetensors
    512   safetensors header (1024 with an encoding), padded with spaces: tensor data is 64-byte aligned in the member
    ...   the states' tensors (`stored.py`), input_ids, loss_mask
    pad   to 512

An archive ends with 1024 zero bytes. So a sample's offset in its shard is a sum of token counts, the samples can be
written in any order, and the same samples always give the same bytes. A compressed sample's size is known only when it
is there: until the seal it lies in a slot of the largest size that it can have (`block_layout` without `packed`).
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import ConfigError
from eagle3_data.protocol import DTYPE_BYTES, parse_strict, safetensors_header, tensor_bytes
from eagle3_data.shards.stored import FRAME_VALUES, PAD, state_columns, states_nbytes, stored_tensors

PER_FOLDER = 9_000
"""Shards per folder of a mirror: the hub takes 10,000 entries, and further folders lie in the first."""
TAR_BLOCK = 512
JSON_BYTES = 1024
HEADER_BYTES = 512
HEAD_BYTES = TAR_BLOCK + JSON_BYTES + TAR_BLOCK
"""From the start of a sample's block to its safetensors member."""
END_BYTES = 2 * TAR_BLOCK
MAX_MEMBER_BYTES = 8 * 2**30 - 1
"""USTAR writes sizes as 11 octal digits."""
MAX_ARROW_BYTES = 2**31 - 2
"""Above this a sample cannot go through an Arrow binary column, so plain `datasets` cannot read it."""
LONGEST_KEY = 24


def load_object(data: bytes) -> dict[str, Any]:
    """A JSON object from a stranger. Raises ValueError for anything else, for a name given twice and for deep nests."""
    try:
        loaded = json.loads(data, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("JSON nested too deep") from None
    if not isinstance(loaded, dict):
        raise ValueError("not a JSON object")
    return loaded


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    loaded = dict(pairs)
    if len(loaded) != len(pairs):
        raise ValueError("a name is given twice")
    return loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecord:
    """The JSON member of one sample."""

    key: str
    id: str
    """The user's own id of the conversation."""
    tokens: int
    supervised: int
    """Tokens with loss_mask 1."""
    ids_digest: str
    next_token: int
    """The server's top-1 token after the last one."""
    checksum: str
    """XXH3-128 of the server's state tensors, hex `aux:last` (`aux` alone when the last state is not used)."""
    stored: str = ""
    """XXH3-128 of the state tensors as they are stored, hex; empty where they are stored as the server sent them."""

    def to_dict(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in self.__slots__
        }  # asdict copies deeply, and takes ten times as long

    def to_json(self) -> bytes:
        """Exactly JSON_BYTES bytes. Raises ConfigError for an id that does not fit."""
        text = json.dumps(self.to_dict(), separators=(",", ":")).encode()
        if len(text) > JSON_BYTES:
            raise ConfigError(
                f"sample {self.key}: its id takes {id_nbytes(self.id)} bytes as JSON, {MAX_ID_BYTES} fit",
                next="shorten the id",
            )
        return text + b" " * (JSON_BYTES - len(text))

    @classmethod
    def from_json(cls, data: bytes) -> SampleRecord:
        """Raises ValueError when the bytes are not such a record."""
        loaded = load_object(data)
        try:
            return cls(**parse_strict(cls, loaded, "sample record"))
        except TypeError as error:
            raise ValueError(f"sample record: {error}") from error


def id_nbytes(sample_id: str) -> int:
    """Bytes of an id in the JSON member: a character that is not ASCII takes 6, or 12."""
    return len(json.dumps(sample_id)) - 2


def _others_nbytes() -> int:
    """Bytes of the longest record, without its id."""
    most = 2**31 - 1
    record = SampleRecord(
        key="0" * LONGEST_KEY,
        id="",
        tokens=most,
        supervised=most,
        ids_digest="0" * 32,
        next_token=most,
        checksum="0" * 65,
        stored="0" * 32,
    )
    return len(json.dumps(record.to_dict(), separators=(",", ":")))


MAX_ID_BYTES = JSON_BYTES - _others_nbytes()
"""Longest id, in bytes of its JSON: what a record of any sample has room for."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Offsets of one sample's parts from the start of its block, in bytes."""

    tokens: int
    member_bytes: int
    """Size of the safetensors member: header and tensors."""
    state_bytes: int
    """All state tensors together; they start at `states`."""
    header_bytes: int = HEADER_BYTES

    member = HEAD_BYTES

    @property
    def states(self) -> int:
        return HEAD_BYTES + self.header_bytes

    @property
    def tail(self) -> int:
        """Start of input_ids; loss_mask follows."""
        return self.states + self.state_bytes

    @property
    def total(self) -> int:
        return HEAD_BYTES + self.member_bytes + -self.member_bytes % TAR_BLOCK


def shard_number(name: str) -> int:
    """`train-000012.tar` -> 12. Raises ValueError for another name."""
    return int(name.removesuffix(".tar").rpartition("-")[2])


def remote_path(shard: str) -> str:
    """Where a shard lies in a mirror: `data/train-000000.tar`; from shard 9,000 on `data/001/train-009000.tar`."""
    group = shard_number(shard) // PER_FOLDER
    return f"data/{group:03d}/{shard}" if group else f"data/{shard}"


def header_bytes(spec: CaptureSpec) -> int:
    return HEADER_BYTES if spec.as_sent else 2 * HEADER_BYTES


def block_layout(spec: CaptureSpec, tokens: int, packed: Sequence[int] | None = None) -> BlockLayout:
    """`packed`: bytes of the high planes of a compressed sample; None: the most they can be."""
    state_bytes, header = states_nbytes(spec, tokens, packed), header_bytes(spec)
    return BlockLayout(tokens, header + state_bytes + 5 * tokens, state_bytes, header)


def block_sizes(spec: CaptureSpec, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """`block_layout(...).total` for many samples at once: int64 [N]."""
    count = tokens.astype(np.int64)
    member = header_bytes(spec) + 5 * count + 6 * count * spec.top_k
    for column in state_columns(spec):
        values = count * column.groups * spec.width
        if column.encoding == "bf16":
            member += values * DTYPE_BYTES[spec.dtype]
        elif column.encoding == "fp8":
            member += values + 4 * count * column.groups
        else:
            member += values + (values + -values % PAD) + 4 * -(-values // FRAME_VALUES)
    return HEAD_BYTES + (member + TAR_BLOCK - 1) // TAR_BLOCK * TAR_BLOCK


def member_bytes_per_token(spec: CaptureSpec) -> float:
    """Of a long sample; with compression, the most it can be."""
    return block_layout(spec, 1 << 20).member_bytes / (1 << 20) if not spec.as_sent else spec.state_bytes_per_token + 5


def tar_header(name: str, size: int) -> bytes:
    """512 bytes, reproducible: mode 0644, no owner, time 0."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o644, 0
    return info.tobuf(tarfile.USTAR_FORMAT)


def block_head(record: SampleRecord, layout: BlockLayout) -> bytes:
    """Everything before the safetensors member."""
    json_member = tar_header(f"{record.key}.json", JSON_BYTES) + record.to_json()
    return json_member + tar_header(f"{record.key}.safetensors", layout.member_bytes)


def member_header(spec: CaptureSpec, tokens: int, packed: Sequence[int] | None = None) -> bytes:
    """The safetensors header of a stored sample: `header_bytes(spec)` bytes."""
    return safetensors_header(stored_tensors(spec, tokens, packed), reserve=header_bytes(spec))


def state_ranges(spec: CaptureSpec, tokens: int) -> list[tuple[int, int]]:
    """(start, end) of each state tensor from the start of the states, as the server sends them: aux, then last."""
    ranges, start = [], 0
    for _, dtype, shape in spec.tensors(tokens)[: 1 + (spec.last == "hidden")]:
        end = start + tensor_bytes(dtype, shape)
        ranges.append((start, end))
        start = end
    return ranges
