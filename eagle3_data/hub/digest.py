"""Checksums of shards, here and in a mirror, in one pass over the bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from eagle3_data.hub.mirror import Mirror

PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Digest:
    nbytes: int
    sha256: str
    xxh3: str


def digest_of(pieces: Iterator[bytes]) -> Digest:
    """Hex digests of the concatenation."""
    sha256, xxh3, nbytes = hashlib.sha256(), xxhash.xxh3_128(), 0
    for piece in pieces:
        sha256.update(piece)
        xxh3.update(piece)
        nbytes += len(piece)
    return Digest(nbytes, sha256.hexdigest(), xxh3.hexdigest())


def file_digest(path: Path) -> Digest:
    return digest_of(_pieces(path))


def file_xxh3(path: Path) -> str:
    """The fast checksum alone, hex: what manifests name a shard's bytes by."""
    xxh3 = xxhash.xxh3_128()
    for piece in _pieces(path):
        xxh3.update(piece)
    return xxh3.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(8 << 20):
            yield piece


def remote_digest(mirror: Mirror, path: str, nbytes: int) -> Digest:
    """Reads the file through the network and keeps nothing of it."""
    starts = range(0, nbytes, PIECE_BYTES)
    return digest_of(mirror.read_range(path, start, min(start + PIECE_BYTES, nbytes)) for start in starts)
