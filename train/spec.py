"""`DraftSpec`: the one description of a draft that the model, the checkpoints and both exports are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import ConfigError
from eagle3_data.protocol import parse_strict
from eagle3_data.train.config import DraftConfig
from eagle3_data.train.rope import RopeSpec
from eagle3_data.train.target import TargetInfo

MLA_HEAD_DIM = 128
MLA_KV_HEADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSpec:
    """Shape of the draft and what it belongs to. H = hidden_size = the target's width."""

    target_model: str
    target_architecture: str
    """First entry of the target's `architectures`; some engines number layers by it."""
    target_layers: int
    hidden_size: int
    aux_layers: tuple[int, ...]
    """Aux layers as outputs (`CaptureSpec.layers`)."""
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Of the target."""
    draft_vocab_size: int
    rms_norm_eps: float
    max_positions: int
    """The target's position limit, not the training length."""
    rope: RopeSpec
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    sliding_window_tokens: int | None = None
    latent_attention: bool = False
    """The target's attention is MLA; the draft's is plain."""
    target_quantised: bool = False
    """The target's checkpoint is quantised; the draft is not."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    trained_tokens: int = 0
    """Longest sample seen in training, in tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "aux_layers", tuple(self.aux_layers))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"draft.num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"draft.num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ConfigError(f"draft.head_dim must be even, got {self.head_dim}")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(f"draft.vocab_size must be in 1..{self.vocab_size}, got {self.draft_vocab_size}")

    @property
    def reduced_vocab(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    @property
    def aux_width(self) -> int:
        return len(self.aux_layers) * self.hidden_size

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "aux_layers": list(self.aux_layers)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DraftSpec:
        values = parse_strict(cls, data, "draft spec")
        rope = RopeSpec(**parse_strict(RopeSpec, values.pop("rope"), "draft spec: rope"))
        return cls(rope=rope, **values)

    def trained_to(self, tokens: int) -> DraftSpec:
        return replace(self, trained_tokens=max(self.trained_tokens, tokens))


def draft_spec(config: DraftConfig, target: TargetInfo, capture: CaptureSpec) -> DraftSpec:
    """The draft for `target` on data of `capture`. Raises ConfigError when the two do not belong together."""
    if capture.width != target.hidden_size:
        raise ConfigError(
            f"the data's states are {capture.width} wide, {target.model} has hidden size {target.hidden_size}",
            next="set target.model to the model that the data was captured from",
        )
    if capture.last == "none":
        raise ConfigError(
            "the data has no last hidden state, so there is no teacher to train from",
            next="extract again with --last hidden or --last topk:64",
        )
    if capture.norm != "post":
        raise ConfigError(f"the data's last state is {capture.norm!r} of the final norm, training needs 'post'")
    if capture.top_k > target.vocab_size:
        raise ConfigError(f"the data has the top {capture.top_k} tokens, {target.model} has {target.vocab_size}")
    if capture.vocab_size and capture.vocab_size > target.vocab_size:
        raise ConfigError(f"the data has {capture.vocab_size} token ids, {target.model} only {target.vocab_size}")
    heads = config.num_attention_heads or target.num_attention_heads
    kv_heads = config.num_key_value_heads or min(target.num_key_value_heads, heads)
    if target.latent_attention and config.num_key_value_heads is None:
        kv_heads = MLA_KV_HEADS if heads % MLA_KV_HEADS == 0 else heads
    return DraftSpec(
        target_model=target.model,
        target_architecture=target.architecture,
        target_layers=target.num_layers,
        hidden_size=target.hidden_size,
        aux_layers=capture.layers,
        intermediate_size=config.intermediate_size or target.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=config.head_dim or (MLA_HEAD_DIM if target.latent_attention else target.head_dim),
        vocab_size=target.vocab_size,
        draft_vocab_size=min(config.vocab_size or target.vocab_size, target.vocab_size),
        rms_norm_eps=target.rms_norm_eps,
        max_positions=target.max_positions,
        rope=target.rope,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        sliding_window_tokens=config.sliding_window_tokens,
        latent_attention=target.latent_attention,
        target_quantised=target.quantised,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
    )
