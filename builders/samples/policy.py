"""What is kept: length limits, samples with nothing to learn, exact duplicates."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from eagle3_data.builders.samples.spec import SampleSpec

TOO_LONG = "too long"
TRUNCATED = "truncated, nothing to learn"
NOTHING = "nothing to learn"
DUPLICATE = "duplicate"

RECENT = 1 << 16
"""Digests held in a Python set before they move to sorted arrays (16 bytes each)."""


def limit(ends: list[int], tokens: int, spec: SampleSpec) -> int | str:
    """Tokens to keep, or the reason to drop. `ends`: where each supervised turn ends, ascending."""
    if not ends:
        return NOTHING
    if spec.max_tokens is None or tokens <= spec.max_tokens:
        return tokens
    if spec.truncation == "drop":
        return TOO_LONG
    fitting = [end for end in ends if end <= spec.max_tokens]
    return fitting[-1] if fitting else TRUNCATED


def mask_ends(mask: NDArray[np.uint8]) -> list[int]:
    """Ends of the runs of ones."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0])).astype(np.int8)))
    return [int(end) for end in edges[1::2]]


def sample_digest(input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> bytes:
    """XXH3-128 of ids (little-endian int32) and mask."""
    digest = xxhash.xxh3_128(np.ascontiguousarray(input_ids, dtype="<i4").data)
    digest.update(np.ascontiguousarray(loss_mask).data)
    return digest.digest()


class Seen:
    """A set of 16-byte digests in 16 bytes each: recent ones in a set, older ones in sorted arrays that double."""

    def __init__(self) -> None:
        self._recent: set[bytes] = set()
        self._sorted: list[NDArray[np.bytes_]] = []

    def add(self, digest: bytes) -> bool:
        """True when the digest is new."""
        if digest in self._recent:
            return False
        key = np.frombuffer(digest, dtype="S16")[0]
        for array in self._sorted:
            at = int(np.searchsorted(array, key))
            if at < len(array) and array[at] == key:
                return False
        self._recent.add(digest)
        if len(self._recent) >= RECENT:
            self._settle()
        return True

    def _settle(self) -> None:
        array = np.sort(np.frombuffer(b"".join(self._recent), dtype="S16"))
        self._recent.clear()
        while self._sorted and len(self._sorted[-1]) <= len(array):
            array = np.sort(np.concatenate([self._sorted.pop(), array]))
        self._sorted.append(array)
