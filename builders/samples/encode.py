"""Text to ids, and character positions to token positions, with fast tokenizers (offsets) and slow ones (prefixes).

A position in the text is a *clean start* when the ids before it are exactly the ids of the text before it: then a
server that was sent that text as its prompt has seen those ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

PROBE = "The quick brown fox: 0123456789 äöü 漢字\n\n  x"


@dataclass(frozen=True, slots=True)
class Cut:
    """Where one supervised span lies in the text (character positions)."""

    prompt: int
    """End of what serving sends as the prompt."""
    start: int
    """First character to learn; equals `prompt` unless reasoning is context only."""
    end: int


@dataclass(frozen=True, slots=True)
class TokenCut:
    """The same span in tokens. `clean`: the ids before `prompt` are the prompt's own ids."""

    prompt: int
    start: int
    end: int
    clean: bool


@dataclass(frozen=True, slots=True)
class Encoded:
    ids: list[int]
    cuts: tuple[TokenCut, ...]


class Encoder(Protocol):
    """What the mask needs of a tokenizer."""

    special_ids: frozenset[int]
    digest: str

    def encode(self, text: str) -> list[int]:
        """Ids of a text that carries its own BOS: nothing is added."""

    def encode_after(self, text: str) -> list[int]:
        """Ids of a text as it continues a prompt (no BOS, no dummy prefix space)."""

    def encode_cuts(self, texts: Sequence[tuple[str, Sequence[Cut]]]) -> list[Encoded]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids with special tokens shown."""


def make_encoder(tokenizer: Any) -> Encoder:
    """Fast where the tokenizer has a Rust backend and encodes with nothing of its own around it."""
    if getattr(tokenizer, "backend_tokenizer", None) is not None and _is_plain(tokenizer):
        fast, slow = FastEncoder(tokenizer), SlowEncoder(tokenizer)
        probe = PROBE + "".join(str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(fast.special_ids)[:8])
        if fast.encode(probe) == slow.encode(probe):
            return fast
    return SlowEncoder(tokenizer)


class SlowEncoder:
    """Any tokenizer with `encode` and `decode`: positions are found by encoding prefixes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # like SGLang: the switch is named only where needed, since some slow tokenizers take another path with it
        self._adds_specials = _adds_specials(tokenizer)
        self.special_ids = _special_ids(tokenizer)
        self.digest = tokenizer_digest(tokenizer)
        self._anchor = _anchor(tokenizer, self.special_ids)

    def encode(self, text: str) -> list[int]:
        options = {"add_special_tokens": False} if self._adds_specials else {}
        return [int(token) for token in self._tokenizer.encode(text, **options)]

    def encode_after(self, text: str) -> list[int]:
        if self._anchor is not None:
            ids = self.encode(self._anchor[1] + text)
            if ids[:1] == [self._anchor[0]]:
                return ids[1:]
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def encode_cuts(self, texts: Sequence[tuple[str, Sequence[Cut]]]) -> list[Encoded]:
        return [self._encode_cuts(text, cuts) for text, cuts in texts]

    def _encode_cuts(self, text: str, cuts: Sequence[Cut]) -> Encoded:
        ids = self.encode(text)
        return Encoded(ids, tuple(self._token_cut(text, ids, cut) for cut in cuts))

    def _token_cut(self, text: str, ids: list[int], cut: Cut) -> TokenCut:
        prompt = self.encode(text[: cut.prompt])
        shared = _common(prompt, ids)
        start = shared if cut.start == cut.prompt else _common(self.encode(text[: cut.start]), ids)
        end = len(ids) if cut.end == len(text) else _common(self.encode(text[: cut.end]), ids)
        return TokenCut(shared, start, end, clean=shared == len(prompt))


class FastEncoder(SlowEncoder):
    """Rust backend: one encoding per text; positions from its offsets, proven with the short text before each."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        # a tokenizer file may ask for padding or truncation; transformers, too, sets both anew on every call
        self._backend.no_padding()
        self._backend.no_truncation()
        super().__init__(tokenizer)
        self._tails: dict[str, list[int]] = {}
        # only these split the text before anything else happens, so what follows them is encoded by itself
        self._anchors = frozenset(
            token
            for token, added in self._backend.get_added_tokens_decoder().items()
            if added.special and not added.normalized
        )

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_cuts(self, texts: Sequence[tuple[str, Sequence[Cut]]]) -> list[Encoded]:
        encodings = self._backend.encode_batch([text for text, _ in texts], add_special_tokens=False)
        return [self._locate(text, cuts, encoding) for (text, cuts), encoding in zip(texts, encodings, strict=True)]

    def _locate(self, text: str, cuts: Sequence[Cut], encoding: Any) -> Encoded:
        ids = list(encoding.ids)
        return Encoded(ids, tuple(self._fast_cut(text, ids, cut, encoding) for cut in cuts))

    def _fast_cut(self, text: str, ids: list[int], cut: Cut, encoding: Any) -> TokenCut:
        prompt = _token_at(encoding, cut.prompt, len(ids))
        if prompt is None:
            return self._token_cut(text, ids, cut)  # a token lies across the position, or there are no offsets
        if not self._ends_clean(text, ids, cut.prompt, prompt, encoding):
            return TokenCut(prompt, prompt, prompt, clean=False)
        start = prompt if cut.start == cut.prompt else _token_at(encoding, cut.start, len(ids))
        end = len(ids) if cut.end == len(text) else _token_at(encoding, cut.end, len(ids))
        if start is None or end is None:
            return self._token_cut(text, ids, cut)
        return TokenCut(prompt, start, end, clean=True)

    def _ends_clean(self, text: str, ids: list[int], position: int, token: int, encoding: Any) -> bool:
        """Whether `ids[:token]` are the ids of `text[:position]`, looking back to the nearest special token only."""
        anchor = token - 1
        while anchor >= 0 and ids[anchor] not in self._anchors:
            anchor -= 1
        if anchor < 0:
            return self.encode(text[:position]) == ids[:token]
        tail = text[encoding.token_to_chars(anchor)[0] : position]
        known = self._tails.get(tail)
        if known is None:
            known = self.encode(tail)
            if len(tail) <= 64 and len(self._tails) < 4096:
                self._tails[tail] = known
        return known == ids[anchor:token]


def _token_at(encoding: Any, position: int, count: int) -> int | None:
    """The token that starts at this character; None when one lies across it."""
    token = encoding.char_to_token(position)
    if token is None:
        return None
    return int(token) if encoding.token_to_chars(token)[0] == position and token < count else None


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    if list(right[: len(left)]) == list(left):
        return len(left)
    shared = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        shared += 1
    return shared


def _is_plain(tokenizer: Any) -> bool:
    """No subclass overrides how text becomes ids."""
    from transformers import PreTrainedTokenizerFast

    names = ("__call__", "_encode_plus", "encode", "_tokenize", "tokenize")
    return all(getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in names)


def _adds_specials(tokenizer: Any) -> bool:
    try:
        return len(tokenizer.encode("")) > 0
    except Exception:  # a tokenizer with remote code may refuse empty text; then the switch is the safe choice
        return True


def _special_ids(tokenizer: Any) -> frozenset[int]:
    ids = {int(token) for token in getattr(tokenizer, "all_special_ids", ())}
    for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if added.special:
            ids.add(int(token))
    return frozenset(ids)


def _anchor(tokenizer: Any, special_ids: frozenset[int]) -> tuple[int, str] | None:
    """A special token to put before a continuation, so that no prefix space is made up."""
    for token in sorted(special_ids):
        text = tokenizer.convert_ids_to_tokens(token)
        if isinstance(text, str) and text:
            return token, text
    return None


def tokenizer_digest(tokenizer: Any) -> str:
    """128-bit BLAKE2b of what turns text into ids: the Rust backend's JSON, or vocabulary and probes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = backend.to_str().encode()
    else:
        vocabulary = sorted((str(token), int(number)) for token, number in tokenizer.get_vocab().items())
        probe = tokenizer.encode(PROBE)
        content = repr((vocabulary, [int(token) for token in probe])).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
