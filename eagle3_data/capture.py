"""What a data set's states are: model, layers, norm, widths. Standard library alone; stored in every manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from eagle3_data.errors import ConfigError
from eagle3_data.protocol import AUX, DTYPE_BYTES, IDS, LAST, LAYER_CONVENTION, MASK, parse_strict

LastState = Literal["hidden", "none"]
LAST_STATES: tuple[LastState, ...] = get_args(LastState)
Alignment = Literal["legacy", "input", "strict"]
"""Which rows a trainer takes from the stored loss mask; see docs/training.md."""
ALIGNMENTS: tuple[Alignment, ...] = get_args(Alignment)
DEFAULT_ALIGNMENT: Alignment = "strict"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec:
    """The states stored for every token: L aux layers and the last state, W wide."""

    model: str
    """The target as its user names it (hub id or folder)."""
    layers: tuple[int, ...]
    """Aux layers as *outputs*: k is transformers' `hidden_states[k + 1]`."""
    width: int
    dtype: str = "bfloat16"
    last: LastState = "hidden"
    """'hidden': the last state after the final norm; 'none': aux layers alone."""
    norm: str = "post"
    convention: str = LAYER_CONVENTION
    vocab_size: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if list(self.layers) != sorted(set(self.layers)) or not self.layers:
            raise ConfigError(f"capture.layers must be ascending without repeats, got {list(self.layers)}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"capture.dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if self.width <= 0:
            raise ConfigError(f"capture.width must be > 0, got {self.width}")
        if self.last not in LAST_STATES:
            raise ConfigError(f"capture.last {self.last!r} is not one of {', '.join(LAST_STATES)}")

    @property
    def state_bytes_per_token(self) -> int:
        """Bytes of aux and last state per token (Kimi-K2.5: 57,344 with the last state, 43,008 without)."""
        states = len(self.layers) + (self.last == "hidden")
        return states * self.width * DTYPE_BYTES[self.dtype]

    def tensors(self, tokens: int) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of one stored sample in file order: the states first, as in the server's dump."""
        states = [(AUX, self.dtype, (tokens, len(self.layers) * self.width))]
        if self.last == "hidden":
            states.append((LAST, self.dtype, (tokens, self.width)))
        return [*states, (IDS, "int32", (tokens,)), (MASK, "uint8", (tokens,))]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "layers": list(self.layers)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CaptureSpec:
        return cls(**parse_strict(cls, data, "capture"))
