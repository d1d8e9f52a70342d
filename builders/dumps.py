"""Opening a dump and proving that it is the request's. Everything a client believes about a dump is checked here."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import DumpCorrupt, DumpMismatch, DumpMissing, NonFinite, ShardCorrupt
from eagle3_data.protocol import AUX, IDS, LAST, DumpMeta, ProtocolError, RequestId, ids_digest
from eagle3_data.shards.reader import parse_header, read_metadata

HEAD_BYTES = 1 << 16
"""More than any dump header of ours; a file whose header is longer is not a dump."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt as it is sent."""

    rid: RequestId
    input_ids: Sequence[int]

    @property
    def tokens(self) -> int:
        return len(self.input_ids)


class Dump:
    """An open dump that passed `check`; `fd` stays valid until the context ends, even if the file is removed."""

    def __init__(self, fd: int, states_at: int, next_token: int, checksum: str, instance: str) -> None:
        self.fd, self.states_at = fd, states_at
        self.next_token, self.checksum, self.instance = next_token, checksum, instance

    def __enter__(self) -> Dump:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self.fd)


def open_dump(path: Path, request: Request, spec: CaptureSpec) -> Dump:
    """Raises DumpMismatch (not the request's), NonFinite, DumpCorrupt (not a whole dump), or DumpMissing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise DumpMissing(f"dump {path.name} was removed by somebody before it was read") from None
    try:
        size = os.fstat(fd).st_size
        head = os.pread(fd, HEAD_BYTES, 0)
        try:
            tensors = parse_header(head, size)
            meta = DumpMeta.from_strings(read_metadata(head))
        except (ShardCorrupt, ProtocolError) as error:
            raise DumpCorrupt(f"dump {path.name}: {error}") from error
        check(meta, request, spec)
        check_tensors(tensors, request, spec)
        low, high = tensors[IDS][2:]
        if os.pread(fd, high - low, low) != array("i", request.input_ids).tobytes():
            raise DumpMismatch(f"dump {path.name}: its input_ids are not the request's")
        return Dump(fd, tensors[AUX][2], meta.next_token, meta.checksum, meta.instance)
    except BaseException:
        os.close(fd)
        raise


def check(meta: DumpMeta, request: Request, spec: CaptureSpec) -> None:
    """The invariants of DESIGN section 3: count, digest, identity, widths, finite. Names the field that differs."""
    expected: dict[str, Any] = {
        "rid": str(request.rid),
        "tokens": request.tokens,
        "ids_digest": ids_digest(request.input_ids),
        "layers": spec.layers,
        "width": spec.width,
        "dtype": spec.dtype,
        "norm": spec.norm,
        "convention": spec.convention,
    }
    for field, want in expected.items():
        found = getattr(meta, field)
        if found != want:
            raise DumpMismatch(f"dump of {request.rid}: {field} is {found}, expected {want}")
    if not meta.finite:
        raise NonFinite(f"dump of {request.rid}: NaN or Inf in its states")


def check_tensors(
    tensors: dict[str, tuple[torch.dtype, list[int], int, int]], request: Request, spec: CaptureSpec
) -> None:
    """The shapes that the header states, against the request and the spec."""
    dtype = getattr(torch, spec.dtype)
    shapes = {
        AUX: (dtype, [request.tokens, len(spec.layers) * spec.width]),
        LAST: (dtype, [request.tokens, spec.width]),
        IDS: (torch.int32, [request.tokens]),
    }
    for name, (want_dtype, want_shape) in shapes.items():
        if name not in tensors:
            raise DumpMismatch(f"dump of {request.rid}: tensor {name} is missing")
        found_dtype, found_shape = tensors[name][:2]
        if found_dtype != want_dtype or found_shape != want_shape:
            raise DumpMismatch(
                f"dump of {request.rid}: {name} is {found_dtype} {found_shape}, expected {want_dtype} {want_shape}"
            )
    if tensors[LAST][2] != tensors[AUX][3]:
        raise DumpCorrupt(f"dump of {request.rid}: its state tensors do not touch each other")
