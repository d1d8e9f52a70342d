"""What the patched server and its clients agree on. Standard library alone: this module runs inside SGLang.

A client posts one tokenised prompt to `/generate` with a request id of our form. The server prefills it and
leaves one dump in its spool: `{rid}.safetensors`, or `{rid}.error.json` when it could not. Files appear under
their final name only when they are whole (hidden temporary name, then rename).

Dump layout (safetensors; T tokens, L aux layers, W width):
    aux_hidden_states  [T, L*W]  model dtype  outputs of the aux layers (residual stream), concatenated in layer order
    last_hidden_state  [T, W]    model dtype  after the final norm, so `lm_head(x)` gives the target's logits
    input_ids          [T]       int32
`__metadata__` holds the fields of `DumpMeta`, as strings. The two state tensors come first and touch each other, so a
client moves them into a shard with one copy that never enters Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

PROTOCOL_VERSION = 1

SPOOL_ENV = "EAGLE3_DATA_SPOOL"
"""The one environment variable: the spool folder. Set it, and the plugin captures; unset, the plugin does nothing."""

SPOOL_CONFIG = "eagle3.json"
"""Name of the optional settings file inside the spool (fields of `SpoolConfig`)."""

LAYER_CONVENTION = "output_of_layer"
"""Layer id k means the residual stream after decoder layer k ran: transformers' `hidden_states[k + 1]`."""

RID = re.compile(r"e3d-(?P<run>[A-Za-z0-9]{1,16})-(?P<key>[A-Za-z0-9_]{1,80})-(?P<attempt>\d{1,6})")

AUX, LAST, IDS, MASK = "aux_hidden_states", "last_hidden_state", "input_ids", "loss_mask"

DUMP_SUFFIX, ERROR_SUFFIX = ".safetensors", ".error.json"

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SAFETENSORS_DTYPE = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "int32": "I32",
    "uint8": "U8",
}


def instance_marker(spool: Path, instance: str) -> Path:
    """Empty file that a server leaves in its spool; a client that sees it shares the folder."""
    return spool / f".server-{instance}"


DUMPS_ROUTE = "/eagle3/dumps/{rid}"


class ProtocolError(ValueError):
    """Two sides disagree about the form of a message or a file; the text names the field."""


@dataclass(frozen=True, slots=True)
class RequestId:
    """`e3d-{run}-{key}-{attempt}`. SGLang passes request ids through unchecked, so this form is the whole filter."""

    run: str
    key: str
    attempt: int

    def __str__(self) -> str:
        return f"e3d-{self.run}-{self.key}-{self.attempt}"

    @classmethod
    def parse(cls, rid: object) -> RequestId | None:
        """The id, or None when the request is not ours (health checks, other clients, `../x`)."""
        match = RID.fullmatch(rid) if isinstance(rid, str) else None
        return cls(match["run"], match["key"], int(match["attempt"])) if match else None


def ids_digest(input_ids: Sequence[int]) -> str:
    """128-bit BLAKE2b over the ids as little-endian int32; the same on the server and on the client."""
    packed = array("i", input_ids)
    if struct.pack("=i", 1) != struct.pack("<i", 1):
        packed.byteswap()
    return hashlib.blake2b(packed.tobytes(), digest_size=16).hexdigest()


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's three aux layers as outputs: 1, n//2-1, n-4 (61 layers: 1, 29, 57). Raises below 6 layers."""
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    if not 0 <= layers[0] < layers[1] < layers[2]:
        raise ProtocolError(
            f"{num_layers} layers are too few for the default aux layers; name them (--layers, outputs of layers)"
        )
    return layers


def parse_strict(cls: type[Any], data: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Keyword arguments for dataclass `cls`; a missing or unknown field raises, so a typo is never a default."""
    names = {f.name for f in fields(cls)}
    unknown = sorted(set(data) - names)
    if unknown:
        raise ProtocolError(f"{what}: unknown field {unknown[0]!r}; known: {', '.join(sorted(names))}")
    return dict(data)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpoolConfig:
    """Settings of one capturing server, in `{spool}/eagle3.json`; every field has a safe default."""

    layers: tuple[int, ...] | None = None
    """Aux layers as outputs, ascending. None: `default_aux_layers`."""
    high_water_bytes: int = 8 << 30
    """Above this many bytes in the spool the writers wait; the client must have stopped sending by then."""
    pinned_bytes: int = 4 << 30
    """Host buffers for copies from the device; when they are out, the request fails and the scheduler goes on."""
    writers: int = 4
    """Threads that write dumps."""
    temp_age_s: float = 900.0
    """Unfinished temporary files (aborted prompts) older than this are removed."""
    dump_age_s: float = 21600.0
    """Finished dumps and error records that nobody took for this long are removed: their client was killed."""
    shared_spool: bool = False
    """The spool is one folder for all nodes of the server; needed when data-parallel ranks sit on several nodes."""

    def __post_init__(self) -> None:
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(int(layer) for layer in self.layers))
            if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
                raise ProtocolError(f"layers must be ascending, without repeats and >= 0, got {list(self.layers)}")
        for name in ("high_water_bytes", "pinned_bytes", "writers", "temp_age_s", "dump_age_s"):
            if getattr(self, name) <= 0:
                raise ProtocolError(f"{name} must be > 0, got {getattr(self, name)}")

    @classmethod
    def load(cls, spool: Path) -> SpoolConfig:
        """Read `{spool}/eagle3.json`; defaults when it is absent. Raises ProtocolError on anything unknown."""
        path = spool / SPOOL_CONFIG
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            return cls()
        except ValueError as error:
            raise ProtocolError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ProtocolError(f"{path} must hold a JSON object")
        return cls(**parse_strict(cls, data, str(path)))

    def save(self, spool: Path) -> None:
        spool.mkdir(parents=True, exist_ok=True)
        (spool / SPOOL_CONFIG).write_text(json.dumps(asdict(self), indent=1) + "\n")


def spool_from_env() -> Path | None:
    """The spool folder, or None when capture is off. The only place that reads the environment."""
    value = os.environ.get(SPOOL_ENV, "")
    return Path(value) if value else None


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpMeta:
    """`__metadata__` of one dump."""

    rid: str
    tokens: int
    ids_digest: str
    layers: tuple[int, ...]
    width: int
    dtype: str
    norm: str
    """'post': the last state is after the final norm."""
    next_token: int
    """The server's top-1 token after the prompt (argmax of the last row's logits)."""
    finite: bool
    """No NaN or Inf in any row, computed on the device."""
    checksum: str
    """XXH3-128 of the bytes of aux_hidden_states, then of last_hidden_state, as hex `aux:last`."""
    instance: str
    """Random per server start."""
    protocol: int = PROTOCOL_VERSION
    convention: str = LAYER_CONVENTION

    def to_strings(self) -> dict[str, str]:
        return {name: json.dumps(value) for name, value in asdict(self).items()}

    @classmethod
    def from_strings(cls, strings: Mapping[str, str]) -> DumpMeta:
        """Raises ProtocolError when a field is missing, unknown or not of its kind."""
        try:
            data = {name: json.loads(value) for name, value in strings.items()}
            data["layers"] = tuple(data["layers"])
            meta = cls(**parse_strict(cls, data, "dump metadata"))
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"dump metadata: {error}") from error
        if meta.protocol != PROTOCOL_VERSION:
            raise ProtocolError(f"dump metadata: protocol {meta.protocol}, this client speaks {PROTOCOL_VERSION}")
        return meta


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpError:
    """`{rid}.error.json`: why a prompt of ours has no dump."""

    rid: str
    reason: str
    """'pinned_full', 'disk', 'aborted', 'rows' or 'internal'; non-finite states are a flag in the dump."""
    detail: str
    instance: str

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str) -> DumpError:
        try:
            return cls(**parse_strict(cls, json.loads(text), "error record"))
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"error record: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureInfo:
    """What a patched server says of itself: `internal_states[i].eagle3` in `/server_info`."""

    protocol: int
    plugin_version: str
    sglang_version: str
    instance: str
    path: str
    """'native' (SGLang's own aux capture, 0.5.23 and newer) or 'hooks' (0.5.14 to 0.5.22)."""
    model_path: str
    layers: tuple[int, ...]
    """Outputs of these layers, read back from the loaded model, not echoed from arguments."""
    convention: str
    norm: str
    dtype: str
    width: int
    vocab_size: int
    context_length: int
    """Longest prompt the server takes, in tokens."""
    tp_size: int
    dp_size: int
    chunk_tokens: int
    """Chunked-prefill size; -1 when chunking is off."""
    radix_cache: bool
    device: str
    spool: str
    free_bytes: int
    high_water_bytes: int
    backlog_bytes: int
    """Captured and not yet renamed into the spool."""
    dumps_written: int
    dumps_failed: int

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CaptureInfo:
        """Raises ProtocolError when the server speaks another protocol or leaves a field out."""
        if data.get("protocol") != PROTOCOL_VERSION:
            raise ProtocolError(
                f"server speaks capture protocol {data.get('protocol')}, this client speaks {PROTOCOL_VERSION}; "
                "install the same eagle3-data on both sides"
            )
        try:
            info = cls(**parse_strict(cls, data, "server info"))
        except TypeError as error:
            raise ProtocolError(f"server info: {error}") from error
        object.__setattr__(info, "layers", tuple(info.layers))
        return info

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def dump_tensors(*, tokens: int, num_aux: int, width: int, dtype: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """Tensors of a dump in file order: (name, dtype, shape)."""
    return [(AUX, dtype, (tokens, num_aux * width)), (LAST, dtype, (tokens, width)), (IDS, "int32", (tokens,))]


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count * {"int32": 4, "uint8": 1, "float8_e4m3fn": 1, **DTYPE_BYTES}[dtype]


def safetensors_header(
    tensors: Sequence[tuple[str, str, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    *,
    align: int = 64,
    reserve: int = 0,
) -> bytes:
    """Length prefix and JSON of a safetensors file holding `tensors` back to back in this order.

    Spaces pad the JSON, as the format allows, until the data starts at a multiple of `align`; with `reserve` the whole
    header has exactly that many bytes, so that it can be written last over a gap. Raises ProtocolError if it is larger.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + tensor_bytes(dtype, shape)
        header[name] = {"dtype": SAFETENSORS_DTYPE[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    size = 8 + len(text)
    total = reserve or size + -size % align
    if size > total or total % align:
        raise ProtocolError(f"safetensors header needs {size} bytes, {total} are reserved")
    return struct.pack("<Q", total - 8) + text + b" " * (total - size)
