"""A build that training finished (`live`), once it is whole: read as before, from the shards alone.

A run counts samples as it did when it began, by row of the build's store; so it goes on, on every rank, although the
servers are gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from eagle3_data.builders.live import copy_rows, empty_sample, plan_fingerprint, stored_sample
from eagle3_data.builders.samples.store import STORE, SampleStore
from eagle3_data.manifest import MANIFEST, Manifest
from eagle3_data.protocol import IDS, MASK
from eagle3_data.runlock import work_folder
from eagle3_data.shards.reader import ShardSet


def is_finished(out: Path) -> bool:
    """Whether nothing is left to capture, and this machine still knows what was planned."""
    here = (out / MANIFEST).exists() and (work_folder(out) / STORE).exists()
    return here and Manifest.load(out).state == "complete"


class FinishedSamples:
    """With the interface of `LiveSamples`."""

    def __init__(self, out: Path) -> None:
        """Raises as `ShardSet.open` does."""
        self._shards = ShardSet.open(out)
        self._store = SampleStore.open(work_folder(out) / STORE)
        self._number = {key: number for number, key in enumerate(self._shards.keys)}
        self.tokens = self._store.tokens
        self.keys = [sample.key for sample in self._store]
        manifest = self._shards.manifest
        self.fingerprint = plan_fingerprint(manifest)
        self.capture, self.alignment = manifest.spec, manifest.alignment

    def __len__(self) -> int:
        return len(self._store)

    def expect(self, samples: Sequence[int]) -> None:
        """All of them are here."""

    def read(self, i: int, columns: Sequence[str] | None = None) -> dict[str, Tensor]:
        """As `LiveSamples.read`: one that was given up is zeros with an empty mask."""
        names = self._shards.wanted(columns)
        number = self._number.get(self.keys[i])
        if set(names) <= {IDS, MASK}:
            return stored_sample(self._store, i, names, failed=number is None)
        if number is None:
            return empty_sample(self.capture, int(self.tokens[i]), names)
        return self._shards.read(number, names)

    def read_into(self, i: int, out: Mapping[str, Tensor]) -> None:
        """As `ShardSet.read_into`, and by it where there are states."""
        number = self._number.get(self.keys[i])
        if number is None:
            copy_rows(self.read(i, tuple(out)), out)
        else:
            self._shards.read_into(number, out)
