"""Which tokens a run's draft can propose: a warm start's own map, or one of the data, and how much of it they cover.

In the run folder's vocab/, each named by what it depends on: the counts of supervised tokens, the map, and the coverage
by writing system (JSON, all of them; the largest are printed).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_data import durable
from eagle3_data.errors import ConfigError
from eagle3_data.protocol import IDS, MASK
from eagle3_data.train import vocab as maps
from eagle3_data.train.config import TrainConfig
from eagle3_data.train.loader import Samples
from eagle3_data.train.plan import Split

Say = Callable[[str], None]
COUNT_REPORT_EVERY = 5000
SCRIPTS_SHOWN = 4


def make_vocab(
    config: TrainConfig,
    data: Samples,
    split: Split,
    *,
    size: int,
    vocab_size: int,
    target: Path | None,
    say: Say,
    keep: Tensor | None = None,
) -> maps.VocabMap:
    """The stored map of exactly this data and size, or a new one; only ids and loss masks are read.

    `target`: the checkpoint whose tokenizer.json gives the texts for the report by writing system. `keep`: `d2t` of a
    warm start, whose map stays.
    """
    if size >= vocab_size:
        return maps.map_from_d2t(torch.zeros(vocab_size, dtype=torch.int64), vocab_size)
    folder = config.run.output / "vocab"
    counts = _counts(folder, data, split, vocab_size, say)
    if keep is not None:
        found = maps.with_coverage(maps.map_from_d2t(keep, vocab_size), counts)
        if found.size != size:
            raise ConfigError(
                f"draft.init_from has a draft vocabulary of {found.size}, draft.vocab_size is {size}",
                next=f"set draft.vocab_size to {found.size}, or draft.init_vocab to data",
            )
        ids = hashlib.blake2b(found.kept.numpy().tobytes(), digest_size=4).hexdigest()
        key = maps.map_key(fingerprint=f"{data.fingerprint}/{ids}", samples=split.key, size=size, vocab_size=vocab_size)
    else:
        key = maps.map_key(fingerprint=data.fingerprint, samples=split.key, size=size, vocab_size=vocab_size)
        stored = maps.load_map(folder, key)
        found = stored or maps.build_map(counts, size)
        if stored is None:
            maps.save_map(found, folder, key)
    for row in _by_script(folder / f"{key}.coverage.json", counts, found, target)[:SCRIPTS_SHOWN]:
        say(f"  {row.script.lower()}: {row.coverage:.2%} of {row.tokens:,} tokens")
    return found


def _counts(folder: Path, data: Samples, split: Split, vocab_size: int, say: Say) -> npt.NDArray[np.int64]:
    key = maps.map_key(fingerprint=data.fingerprint, samples=split.key, size=0, vocab_size=vocab_size)
    path = folder / f"{key.replace('vocab-0', 'counts')}.safetensors"
    if not path.exists():
        say("counting supervised tokens for the draft vocabulary")
        counted = maps.count_tokens(_supervised(data, split, say), vocab_size)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"counts": torch.from_numpy(counted)}, durable.hidden(path))
        durable.replace(path)
    counts: npt.NDArray[np.int64] = load_file(path)["counts"].numpy()
    return counts


def _supervised(data: Samples, split: Split, say: Say) -> Iterator[tuple[Tensor, Tensor]]:
    for number, sample in enumerate(split.train.tolist(), start=1):
        read = data.read(sample, (IDS, MASK))
        yield read[IDS], read[MASK]
        if number % COUNT_REPORT_EVERY == 0:
            say(f"  counted {number:,} of {len(split.train):,} samples")


def _by_script(
    path: Path, counts: npt.NDArray[np.int64], vocab: maps.VocabMap, target: Path | None
) -> list[maps.ScriptCoverage]:
    if path.exists():
        return [maps.ScriptCoverage(**row) for row in json.loads(path.read_text())]
    pieces = token_pieces(target) if target is not None else {}
    if not pieces:
        return []
    rows = maps.coverage_by_script(counts, vocab, pieces)
    durable.write_text(path, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return rows


def token_pieces(folder: Path) -> dict[int, str]:
    """Decoded text of every token, out of the checkpoint's tokenizer.json alone; empty when there is none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return {}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return {number: tokenizer.decode([number]) for number in range(tokenizer.get_vocab_size())}


def move_head(old_DH: Tensor, old_d2t: Tensor | None, new: maps.VocabMap, start_DH: Tensor) -> Tensor:
    """Rows of `lm_head` for another map: the old row of every token that both have, `start` for the others."""
    d2t = torch.zeros(len(old_DH), dtype=torch.int64) if old_d2t is None else old_d2t
    old = maps.map_from_d2t(d2t, new.vocab_size)
    place = torch.full((new.vocab_size,), -1, dtype=torch.int64)
    place[old.kept] = torch.arange(old.size)
    at = place[new.kept]
    out = start_DH.clone()
    out[at >= 0] = old_DH[at[at >= 0]].to(out.dtype)
    return out
