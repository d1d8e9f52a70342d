"""The draft's vocabulary: the target's tokens that the data's answers use most.

Three forms of one thing: `kept` int64 [D], ascending target ids; `d2t` int64 [D], `kept[i] - i` (engines add it to the
draft id); `t2d` bool [V]. A map is stored under a name made of everything it depends on, so that a map made for other
data or another size is never taken for this one, and never overwritten.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_data import durable
from eagle3_data.errors import ConfigError, TrainingError

MAP_VERSION = 1
COUNT_AT_ONCE = 1 << 18
"""Supervised tokens that are counted together."""


@dataclass(frozen=True, slots=True)
class VocabMap:
    kept: Tensor
    """int64 [D], ascending."""
    vocab_size: int
    coverage: float
    """Share of the supervised tokens that are in the draft vocabulary."""
    seen: int
    """Different supervised tokens in the data."""
    padded: int
    """Kept ids that were never seen, taken from the low end to fill the size."""

    @property
    def size(self) -> int:
        return len(self.kept)

    @property
    def d2t(self) -> Tensor:
        return self.kept - torch.arange(self.size)

    @property
    def t2d(self) -> Tensor:
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[self.kept] = True
        return mask

    def report(self) -> str:
        if self.size == self.vocab_size:
            return f"draft vocabulary: all {self.vocab_size:,} tokens"
        return (
            f"draft vocabulary: {self.size:,} of {self.vocab_size:,} tokens cover {self.coverage:.2%} of the "
            f"supervised tokens ({self.seen:,} different seen, {self.padded:,} unseen low ids added)"
        )


def count_tokens(samples: Iterable[tuple[Tensor, Tensor]], vocab_size: int) -> npt.NDArray[np.int64]:
    """Occurrences of each target id among supervised tokens: int64 [V]. `samples`: (input_ids [T], loss_mask [T])."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    waiting: list[npt.NDArray[np.int32]] = []
    tokens = 0

    def add() -> None:
        """Some samples at once: a count of the whole vocabulary for each alone would be most of the work."""
        nonlocal tokens
        supervised = np.concatenate(waiting) if waiting else np.empty(0, np.int32)
        if supervised.size and (supervised.min() < 0 or supervised.max() >= vocab_size):
            raise ConfigError(
                f"the data has token id {int(supervised.max())}, the target's vocabulary has {vocab_size}",
                next="set target.model to the model that the data was captured from",
            )
        counts[:] += np.bincount(supervised, minlength=vocab_size)
        waiting.clear()
        tokens = 0

    for ids, mask in samples:
        waiting.append(ids.numpy()[mask.numpy() != 0])
        tokens += len(waiting[-1])
        if tokens >= COUNT_AT_ONCE:
            add()
    add()
    return counts


def build_map(counts: npt.NDArray[np.int64], size: int) -> VocabMap:
    """The `size` most frequent ids, ties to the lower id; unseen low ids fill up when fewer were seen."""
    vocab_size = len(counts)
    if not 1 <= size <= vocab_size:
        raise ConfigError(f"draft.vocab_size must be in 1..{vocab_size}, got {size}")
    order = np.argsort(-counts, kind="stable")[:size]
    kept = np.sort(order)
    total, seen = int(counts.sum()), int((counts > 0).sum())
    coverage = float(counts[kept].sum() / total) if total else 0.0
    return VocabMap(torch.from_numpy(kept), vocab_size, coverage, seen, int((counts[kept] == 0).sum()))


def map_key(*, fingerprint: str, samples: str, size: int, vocab_size: int) -> str:
    """Names a map by all it depends on: the data's content, which of its samples, both sizes, this code's version."""
    parts = json.dumps([MAP_VERSION, fingerprint, samples, size, vocab_size])
    return f"vocab-{size}-{hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()}"


def save_map(vocab: VocabMap, folder: Path, key: str) -> Path:
    """Atomic. Returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.safetensors"
    metadata = {name: str(getattr(vocab, name)) for name in ("vocab_size", "coverage", "seen", "padded")}
    save_file({"kept": vocab.kept}, durable.hidden(path), metadata=metadata)
    durable.replace(path)
    return path


def load_map(folder: Path, key: str) -> VocabMap | None:
    """The stored map of this key, or None."""
    path = folder / f"{key}.safetensors"
    if not path.exists():
        return None
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        meta: Mapping[str, str] = opened.metadata() or {}
    kept = load_file(path)["kept"]
    try:
        return VocabMap(kept, int(meta["vocab_size"]), float(meta["coverage"]), int(meta["seen"]), int(meta["padded"]))
    except (KeyError, ValueError) as error:
        raise TrainingError(f"{path} is not a vocabulary map: {error}", next="remove it") from None


def map_from_d2t(d2t: Tensor, vocab_size: int) -> VocabMap:
    """The map of an existing draft (warm start); coverage is unknown and 0. Raises TrainingError on a wrong form."""
    kept = d2t.long() + torch.arange(len(d2t))
    if len(kept) > vocab_size or bool((kept.diff() <= 0).any()) or int(kept[0]) < 0 or int(kept[-1]) >= vocab_size:
        raise TrainingError(f"d2t is not an offset map into {vocab_size} tokens (target id = draft id + d2t)")
    return VocabMap(kept, vocab_size, 0.0, 0, 0)


def with_coverage(vocab: VocabMap, counts: npt.NDArray[np.int64]) -> VocabMap:
    """The same ids with the numbers of this data, for a map that came from elsewhere."""
    kept = vocab.kept.numpy()
    total = int(counts.sum())
    coverage = float(counts[kept].sum() / total) if total else 0.0
    return VocabMap(vocab.kept, vocab.vocab_size, coverage, int((counts > 0).sum()), int((counts[kept] == 0).sum()))


@dataclass(frozen=True, slots=True)
class ScriptCoverage:
    script: str
    tokens: int
    coverage: float


def coverage_by_script(
    counts: npt.NDArray[np.int64], vocab: VocabMap, pieces: Mapping[int, str]
) -> list[ScriptCoverage]:
    """Coverage per writing system of the tokens' text, largest first. `pieces`: decoded text by target id."""
    kept = vocab.t2d.numpy()
    totals: dict[str, list[int]] = {}
    for token in np.flatnonzero(counts):
        entry = totals.setdefault(script_of(pieces.get(int(token), "")), [0, 0])
        entry[0] += int(counts[token])
        entry[1] += int(counts[token]) if kept[token] else 0
    rows = [ScriptCoverage(script, total, inside / total) for script, (total, inside) in totals.items()]
    return sorted(rows, key=lambda row: -row.tokens)


def script_of(text: str) -> str:
    """First letter's writing system as Unicode names it ('LATIN', 'CJK', 'CYRILLIC'); 'OTHER' without a letter."""
    for character in text:
        if character.isalpha():
            return unicodedata.name(character, "OTHER").split(" ")[0].split("-")[0]
    return "OTHER"
