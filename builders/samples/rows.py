"""A chunk of raw rows to samples in flat arrays: the work of one process, with nothing shared."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from eagle3_data.builders.samples.encode import Encoded, Encoder, TokenCut
from eagle3_data.builders.samples.input import BadRow, Form, RawRow, parse_row
from eagle3_data.builders.samples.mask import ConversationTexts, Masker, SampleText
from eagle3_data.builders.samples.messages import Conversation, ServedRow
from eagle3_data.builders.samples.policy import limit, mask_ends, sample_digest
from eagle3_data.errors import InputError, SampleError


@dataclass(frozen=True, slots=True)
class Drop:
    """One sample or row that was not kept, and why."""

    row: int
    id: str
    reason: str
    detail: str = ""


@dataclass(slots=True)
class Chunk:
    """Samples of some consecutive rows, flat: sample i has `tokens[i]` of `input_ids` and of `loss_mask`."""

    rows: int = 0
    keys: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    supervised: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    input_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    loss_mask: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    drops: list[Drop] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    error: InputError | None = None
    """Bad input met at this point of the stream: everything before it is in the chunk."""


class RowRenderer:
    """Rows to samples for one tokenizer and one spec."""

    def __init__(self, masker: Masker, encoder: Encoder, form: Form) -> None:
        self.masker, self.encoder, self.form, self.spec = masker, encoder, form, masker.spec

    def chunk(self, rows: Sequence[RawRow]) -> Chunk:
        """Samples and drops of these rows; on unreadable input, those before it and the error."""
        chunk, parts = Chunk(), _Parts()
        planned: list[tuple[Conversation, SampleText]] = []
        for raw in rows:
            try:
                row = parse_row(raw, self.form)
                chunk.rows += 1
                if isinstance(row, ServedRow):
                    self._keep_served(chunk, parts, row)
                else:
                    found = self.masker.texts(row)
                    _note(chunk.notes, found)
                    planned.extend((row, sample) for sample in found.samples)
            except InputError as error:
                chunk.error = error
                break
            except BadRow as error:
                chunk.rows += 1
                chunk.drops.append(Drop(raw.row, str(raw.row), error.reason, error.message))
            except SampleError as error:
                chunk.drops.append(Drop(row.row, row.id, error.reason, error.message))
        for conversation, sample, encoded in self._encode(chunk, planned):
            self._keep(chunk, parts, conversation, sample.key(conversation.row), encoded)
        parts.fill(chunk)
        return chunk

    def _encode(
        self, chunk: Chunk, planned: Sequence[tuple[Conversation, SampleText]]
    ) -> Iterator[tuple[Conversation, SampleText, Encoded]]:
        """Samples whose ids before every supervised span are the prompt's own ids.

        Where a token lies across the border between prompt and answer, serving never sees that token: the prompt's
        ids and the answer's ids are joined instead, one sample per turn, since a later prompt does merge them.
        """
        found = self.encoder.encode_cuts([(sample.text, sample.cuts) for _, sample in planned])
        for (conversation, sample), encoded in zip(planned, found, strict=True):
            if all(cut.clean for cut in encoded.cuts):
                yield conversation, sample, encoded
            elif len(sample.turns) == 1:
                chunk.notes["joined at the prompt's end"] += 1
                yield conversation, sample, self._join(sample)
            else:
                chunk.notes["split at a token border"] += 1
                yield from self._encode(chunk, [(conversation, part) for part in sample.split()])

    def _join(self, sample: SampleText) -> Encoded:
        cut = sample.cuts[0]
        prompt = self.encoder.encode(sample.text[: cut.prompt])
        context = self.encoder.encode_after(sample.text[cut.prompt : cut.start]) if cut.start > cut.prompt else []
        answer = self.encoder.encode_after(sample.text[cut.start :])
        ids = [*prompt, *context, *answer]
        return Encoded(ids, (TokenCut(len(prompt), len(prompt) + len(context), len(ids), clean=True),))

    def _keep(self, chunk: Chunk, parts: _Parts, row: Conversation, key: str, encoded: Encoded) -> None:
        ids = encoded.ids
        spans = [(cut.start, self._turn_end(ids, cut)) for cut in encoded.cuts]
        spans = [(start, end) for start, end in spans if end > start]
        ends = [end for _, end in spans]
        kept = limit(ends, ends[-1] if ends else 0, self.spec)  # what follows the last answer was never served
        if isinstance(kept, str):
            chunk.drops.append(Drop(row.row, row.id, kept, f"{len(ids)} tokens, answers end at {ends}"))
            return
        mask = np.zeros(kept, np.uint8)
        for start, end in spans:
            mask[start:end] = 1
        parts.add(chunk, key, row.id, row.source, np.frombuffer(array("i", ids[:kept]), np.int32), mask)

    def _turn_end(self, ids: list[int], cut: TokenCut) -> int:
        """Just past the turn-end token: the white space that a template writes after it is not the model's."""
        at = cut.end
        while at > cut.start and ids[at - 1] not in self.encoder.special_ids:
            at -= 1
            if cut.end - at > 8:
                return cut.end
        if at in (cut.start, cut.end):
            return cut.end
        return at if not self.encoder.decode(ids[at : cut.end]).strip() else cut.end

    def _keep_served(self, chunk: Chunk, parts: _Parts, row: ServedRow) -> None:
        ids, mask = np.array(row.input_ids, np.int32), np.array(row.loss_mask, np.uint8)
        kept = limit(mask_ends(mask), len(ids), self.spec)
        if isinstance(kept, str):
            chunk.drops.append(Drop(row.row, row.id, kept, f"{len(ids)} tokens"))
            return
        parts.add(chunk, f"{row.row:08d}", row.id, row.source, ids[:kept], mask[:kept])


class _Parts:
    """Arrays of a chunk's samples until they are joined."""

    def __init__(self) -> None:
        self.ids: list[NDArray[np.int32]] = []
        self.masks: list[NDArray[np.uint8]] = []

    def add(
        self, chunk: Chunk, key: str, row_id: str, source: str | None, ids: NDArray[np.int32], mask: NDArray[np.uint8]
    ) -> None:
        chunk.keys.append(key)
        chunk.ids.append(row_id)
        chunk.sources.append(source)
        chunk.tokens.append(len(ids))
        chunk.supervised.append(int(mask.sum()))
        chunk.digests.append(sample_digest(ids, mask))
        self.ids.append(ids)
        self.masks.append(mask)

    def fill(self, chunk: Chunk) -> None:
        if self.ids:
            chunk.input_ids, chunk.loss_mask = np.concatenate(self.ids), np.concatenate(self.masks)


def _note(notes: Counter[str], found: ConversationTexts) -> None:
    if found.empty_turns:
        notes["empty turns, not learnt"] += found.empty_turns
    if len(found.samples) > 1:
        notes["conversations fanned out"] += 1
    for turn in (turn for sample in found.samples for turn in sample.turns):
        if turn.thinking is not None:
            notes["turns thinking on" if turn.thinking else "turns thinking off"] += 1
        if turn.think_added:
            notes["empty think blocks closed"] += 1
