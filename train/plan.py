"""Which samples make which micro-batch, from the token counts of the index alone; no payload is read.

An epoch is one list of micro-batches, the same for any number of ranks. An optimizer step takes the next
`batches_per_step` of them; rank r of w takes every w-th, starting at r. So a cursor (epoch, micro-batches consumed) is
the whole state of the data, and a run goes on exactly at another world size. Where a step has fewer micro-batches
than ranks (the end of an epoch), a rank gets None and takes part with an empty batch: all ranks make equal steps, and
every sample is seen exactly once per epoch.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle3_data.errors import ConfigError
from eagle3_data.train.config import BatchConfig, DataConfig

MIN_TOKENS = 3
"""A shorter sample has no row with an input token, a target and something to predict."""
TURN = re.compile(r"_t[0-9]+$")
"""How the key of a sample ends that is one of several of its conversation (a template that drops earlier reasoning)."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of samples: one sample per row when padded, several when packed. Sample numbers are the data set's."""

    rows: tuple[tuple[int, ...], ...]
    length: int
    """Positions per row, padding included."""

    @property
    def samples(self) -> list[int]:
        return [sample for row in self.rows for sample in row]

    @property
    def positions(self) -> int:
        return len(self.rows) * self.length


@dataclass(frozen=True, slots=True)
class Split:
    """Sample numbers, ascending, and what was left out or cut."""

    train: npt.NDArray[np.int64]
    holdout: npt.NDArray[np.int64]
    dropped: int
    """Samples too short to train on."""
    cut: int
    """Training samples longer than `max_sample_tokens`, used up to there."""

    @property
    def key(self) -> str:
        """Names the training share, for the vocabulary map and the resume check."""
        return hashlib.blake2b(self.train.tobytes(), digest_size=8).hexdigest()


def split_samples(keys: Sequence[str], tokens: npt.NDArray[np.int32], config: DataConfig, *, seed: int) -> Split:
    """Hold out `holdout_share` of the samples (at most `holdout_max_samples`), by a hash of the key: the choice does
    not depend on the order of the shards, and a growing data set keeps it nearly unchanged. All turns of a conversation
    are on one side, since each has the earlier ones in its prompt."""
    usable = np.flatnonzero(tokens >= MIN_TOKENS)
    names = (f"{seed}:{TURN.sub('', keys[i])}".encode() for i in usable.tolist())
    digests = np.frombuffer(b"".join(hashlib.blake2b(name, digest_size=8).digest() for name in names), ">u8")
    order = np.argsort(digests, kind="stable")
    ordered = digests[order]
    ends = np.flatnonzero(np.diff(ordered, append=ordered[-1:] + 1)) + 1  # where a conversation ends in this order
    wanted = min(round(len(usable) * config.holdout_share), config.holdout_max_samples)
    whole = ends[ends <= wanted]
    if len(whole) == 0 and config.holdout_share > 0 and config.holdout_max_samples > 0 and len(ends) > 1:
        whole = ends[:1]
    held = int(whole[-1]) if len(whole) else 0
    chosen = np.zeros(len(usable), dtype=bool)
    chosen[order[:held]] = True
    holdout, train = usable[chosen].astype(np.int64), usable[~chosen].astype(np.int64)
    if len(train) == 0:
        raise ConfigError(
            f"no sample to train on: {len(keys)} in the data, {len(keys) - len(usable)} too short, {held} held out"
        )
    cut = int((tokens[train] > config.max_sample_tokens).sum())
    return Split(train, holdout, len(keys) - len(usable), cut)


def plan_batches(
    samples: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int32],
    config: BatchConfig,
    *,
    max_sample_tokens: int,
    order: np.random.Generator | None,
) -> list[MicroBatch]:
    """All micro-batches of one pass over `samples`, each sample in exactly one. `order` None: no shuffling.

    Samples are shuffled, sorted by length inside windows of `bucket_samples`, filled into micro-batches of at most
    `micro_batch_tokens` positions, and the micro-batches are shuffled.
    """
    order_of = samples if order is None else order.permutation(samples)
    used = np.minimum(tokens, max_sample_tokens)
    batches: list[MicroBatch] = []
    for low in range(0, len(order_of), config.bucket_samples):
        window = order_of[low : low + config.bucket_samples]
        window = window[np.argsort(-used[window], kind="stable")]
        lengths = used[window].tolist()
        fill = _pack if config.packing else _pad
        batches += fill(window.tolist(), lengths, config)
    if order is not None:
        batches = [batches[i] for i in order.permutation(len(batches))]
    return batches


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _pad(window: list[int], lengths: list[int], config: BatchConfig) -> list[MicroBatch]:
    """Longest first, so that a batch's first sample sets its length."""
    batches, start = [], 0
    while start < len(window):
        length = _round_up(lengths[start], config.pad_multiple)
        count = max(1, config.micro_batch_tokens // length)
        batches.append(MicroBatch(tuple((sample,) for sample in window[start : start + count]), length))
        start += count
    return batches


def _pack(window: list[int], lengths: list[int], config: BatchConfig) -> list[MicroBatch]:
    """Best fit, longest first, into rows of `micro_batch_tokens`; one row per micro-batch."""
    bins: list[list[int]] = []
    by_room: list[tuple[int, int]] = []  # (free positions, bin), ascending
    for sample, length in zip(window, lengths, strict=True):
        at = bisect.bisect_left(by_room, (length, 0))
        if at < len(by_room):
            room, number = by_room.pop(at)
        else:
            room, number = config.micro_batch_tokens, len(bins)
            bins.append([])
        bins[number].append(sample)
        bisect.insort(by_room, (room - length, number))
    length = _round_up(config.micro_batch_tokens, config.pad_multiple)
    return [MicroBatch((tuple(row),), length) for row in bins]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where in the data a run stands; independent of the number of ranks."""

    epoch: int = 0
    consumed: int = 0
    """Micro-batches of this epoch that optimizer steps have used, over all ranks."""


class EpochPlan:
    """The micro-batches of each epoch, and each rank's share of each optimizer step."""

    def __init__(
        self,
        split: Split,
        tokens: npt.NDArray[np.int32],
        config: BatchConfig,
        *,
        max_sample_tokens: int,
        seed: int,
        fingerprint: str,
    ) -> None:
        self.split, self.tokens, self.config = split, tokens, config
        self.max_sample_tokens, self.seed = max_sample_tokens, seed
        settings = [fingerprint, split.key, seed, max_sample_tokens]
        settings += [config.micro_batch_tokens, config.packing, config.bucket_samples, config.pad_multiple]
        self.key = hashlib.blake2b(json.dumps(settings).encode(), digest_size=8).hexdigest()
        self._epoch: tuple[int, list[MicroBatch]] | None = None
        self._lengths: dict[int, int] = {}
        """Micro-batches of the epochs planned so far; asked for from another thread than plans them."""

    def epoch(self, number: int) -> list[MicroBatch]:
        if self._epoch is None or self._epoch[0] != number:
            order = np.random.default_rng([self.seed, number])
            batches = plan_batches(
                self.split.train,
                self.tokens,
                self.config,
                max_sample_tokens=self.max_sample_tokens,
                order=order,
            )
            self._epoch = (number, batches)
            self._lengths[number] = len(batches)
        return self._epoch[1]

    def batches_in(self, epoch: int) -> int:
        """Micro-batches of an epoch."""
        return self._lengths.get(epoch) or len(self.epoch(epoch))

    def _typical(self, epoch: int) -> int:
        """Epochs after the first two are taken to be as long as the second."""
        return self.batches_in(min(epoch, 1))

    def _before(self, epoch: int) -> int:
        """Micro-batches of all epochs before this one."""
        return self._typical(0) + (epoch - 1) * self._typical(1) if epoch > 1 else epoch * self._typical(0)

    def steps_left(self, cursor: Cursor, epochs: int) -> int:
        """Optimizer steps from `cursor` to the end of the last epoch."""
        if cursor.epoch >= epochs:
            return 0
        rest = [self.batches_in(cursor.epoch) - cursor.consumed]
        rest += [self._typical(epoch) for epoch in range(cursor.epoch + 1, epochs)]
        return sum(-(-batches // self.config.batches_per_step) for batches in rest)

    def share(self, cursor: Cursor, epochs: int) -> float:
        """Share of the run's micro-batches before `cursor`, 0..1: whatever number of them a step takes or took."""
        done, total = self._before(min(cursor.epoch, epochs)), self._before(epochs)
        part = self._typical(cursor.epoch) * cursor.consumed / self.batches_in(cursor.epoch) if cursor.consumed else 0.0
        return (done + part) / total if total else 1.0

    def largest_batch(self) -> int:
        """Upper limit on the positions of a micro-batch, for the buffers."""
        longest = min(int(self.tokens[self.split.train].max()), self.max_sample_tokens)
        return max(self.config.micro_batch_tokens, longest) + self.config.pad_multiple

    def holdout(self) -> list[MicroBatch]:
        if len(self.split.holdout) == 0:
            return []
        return plan_batches(
            self.split.holdout,
            self.tokens,
            self.config,
            max_sample_tokens=self.max_sample_tokens,
            order=None,
        )

    def steps(self, cursor: Cursor, *, rank: int, world: int, epochs: int) -> Iterator[Step]:
        """This rank's share of every optimizer step from `cursor` to the end of the last epoch."""
        for epoch in range(cursor.epoch, epochs):
            batches = self.epoch(epoch)
            start = cursor.consumed if epoch == cursor.epoch else 0
            while start < len(batches):
                taken = batches[start : start + self.config.batches_per_step]
                end = start + len(taken)
                after = Cursor(epoch, end) if end < len(batches) else Cursor(epoch + 1, 0)
                yield Step(tuple(share(taken, rank=rank, world=world)), after, len(taken))
                start = end


def share(batches: Sequence[MicroBatch], *, rank: int, world: int) -> list[MicroBatch | None]:
    """Every `world`-th entry from `rank` on; None where this rank has fewer than others."""
    rounds = -(-len(batches) // world)
    return [batches[i * world + rank] if i * world + rank < len(batches) else None for i in range(rounds)]


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's micro-batches of one optimizer step, and where the run stands after it."""

    batches: tuple[MicroBatch | None, ...]
    after: Cursor
    micro_batches: int
    """Of all ranks together; None in `batches` not counted."""
