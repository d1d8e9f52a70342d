"""What a data set's states are: model, layers, norm, widths, encodings. Standard library alone; in every manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from eagle3_data.errors import ConfigError
from eagle3_data.protocol import AUX, DTYPE_BYTES, IDS, LAST, LAYER_CONVENTION, MASK, parse_strict

Alignment = Literal["legacy", "input", "strict"]
"""Which rows a trainer takes from the stored loss mask; see docs/training.md."""
ALIGNMENTS: tuple[Alignment, ...] = get_args(Alignment)
DEFAULT_ALIGNMENT: Alignment = "strict"
LAST_STATES = ("hidden", "topk:K", "none")
"""What is kept of the last state: itself, the target's K most probable tokens, or nothing."""
Encoding = Literal["bf16", "fp8", "bf16-planes"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
"""How a state tensor is stored: as the model ran; e4m3 with a scale per token; high bytes compressed, lossless."""
MAX_TOP_K = 1024
TOP_IDS, TOP_LOGPROBS = "topk_ids", "topk_logprobs"


def parse_last(text: str) -> int:
    """K of 'topk:K', 0 for 'hidden' and 'none'. Raises ConfigError."""
    kind, _, count = text.partition(":")
    if text in ("hidden", "none"):
        return 0
    if kind == "topk" and count.isdecimal() and 1 <= int(count) <= MAX_TOP_K:
        return int(count)
    raise ConfigError(f"capture.last {text!r} is not one of {', '.join(LAST_STATES)} (K from 1 to {MAX_TOP_K})")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec:
    """The states stored for every token: L aux layers and the last state, W wide."""

    model: str
    """The target as its user names it (hub id or folder)."""
    layers: tuple[int, ...]
    """Aux layers as *outputs*: k is transformers' `hidden_states[k + 1]`."""
    width: int
    dtype: str = "bfloat16"
    last: str = "hidden"
    """'hidden': the last state after the final norm; 'topk:K': its K most probable tokens; 'none': aux layers alone."""
    norm: str = "post"
    convention: str = LAYER_CONVENTION
    vocab_size: int = 0
    aux_encoding: Encoding = "bf16"
    last_encoding: Encoding = "bf16"
    """Of the last state when it is stored; 'bf16' otherwise."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if list(self.layers) != sorted(set(self.layers)) or not self.layers:
            raise ConfigError(f"capture.layers must be ascending without repeats, got {list(self.layers)}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"capture.dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if self.width <= 0:
            raise ConfigError(f"capture.width must be > 0, got {self.width}")
        parse_last(self.last)
        for name in (self.aux_encoding, self.last_encoding):
            if name not in ENCODINGS:
                raise ConfigError(f"encoding {name!r} is not one of {', '.join(ENCODINGS)}")
            if name == "bf16-planes" and self.dtype != "bfloat16":
                raise ConfigError(
                    f"bf16-planes splits bfloat16 numbers, the server's states are {self.dtype}",
                    next="--encoding bf16 keeps them as they are",
                )
        if self.last != "hidden" and self.last_encoding != "bf16":
            raise ConfigError(f"capture.last_encoding is {self.last_encoding}, and no last state is stored")

    @property
    def top_k(self) -> int:
        """Tokens kept of the target's distribution; 0 when it is not stored so."""
        return parse_last(self.last)

    @property
    def as_sent(self) -> bool:
        """The states are stored byte for byte as the server sends them."""
        return self.aux_encoding == self.last_encoding == "bf16" and not self.top_k

    @property
    def state_bytes_per_token(self) -> int:
        """Bytes of aux and last state per token before encoding (Kimi-K2.5: 57,344, without the last state 43,008)."""
        states = len(self.layers) + (self.last == "hidden")
        return states * self.width * DTYPE_BYTES[self.dtype]

    @property
    def dump_bytes_per_token(self) -> int:
        """Bytes of a token's states in the server's dump, which has the last state whatever is stored of it."""
        return (len(self.layers) + 1) * self.width * DTYPE_BYTES[self.dtype]

    def tensors(self, tokens: int) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of one sample as it is read: the states first, as in the server's dump."""
        states: list[tuple[str, str, tuple[int, ...]]] = [(AUX, self.dtype, (tokens, len(self.layers) * self.width))]
        if self.last == "hidden":
            states.append((LAST, self.dtype, (tokens, self.width)))
        elif self.top_k:
            states += [(TOP_IDS, "int32", (tokens, self.top_k)), (TOP_LOGPROBS, "float16", (tokens, self.top_k))]
        return [*states, (IDS, "int32", (tokens,)), (MASK, "uint8", (tokens,))]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "layers": list(self.layers)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CaptureSpec:
        return cls(**parse_strict(cls, data, "capture"))
