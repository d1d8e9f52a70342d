"""Rotary positions of the draft, taken from the target's config and written back for the engines.

Formulas: RoPE (arXiv 2104.09864), YaRN (arXiv 2309.00071), Llama-3.1's frequency scaling as in transformers'
`modeling_rope_utils`; SGLang computes the same numbers from the same fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from eagle3_data.errors import ConfigError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
DEFAULT_THETA = 10000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary settings; the scaling fields are read only by the kinds that use them."""

    theta: float = DEFAULT_THETA
    kind: RopeKind = "default"
    factor: float = 1.0
    original_positions: int | None = None
    """llama3, yarn: positions of the target before its context was stretched."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """yarn: round the borders of the blended dimensions (gpt-oss does not)."""
    dropped: str | None = None
    """A scaling of the target's that the draft does not follow (for example 'longrope'), for the linter's warning."""

    @classmethod
    def from_config(cls, text_config: Mapping[str, Any]) -> RopeSpec:
        """From a target's config.json (its text part): `rope_parameters` (transformers 5) or the older two fields."""
        scaling = dict(text_config.get("rope_parameters") or {})
        if scaling and all(isinstance(value, Mapping) for value in scaling.values()):
            # one entry per layer type; the draft attends to everything, like the full-attention layers
            scaling = dict(scaling.get("full_attention") or next(iter(scaling.values())))
        scaling = {**dict(text_config.get("rope_scaling") or {}), **scaling}
        theta = float(scaling.get("rope_theta") or text_config.get("rope_theta") or DEFAULT_THETA)
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        kind = "default" if kind == "mrope" else kind
        if kind not in ("default", "linear", "llama3", "yarn"):
            return cls(theta=theta, dropped=str(kind))
        original = scaling.get("original_max_position_embeddings")
        if kind in ("llama3", "yarn") and original is None:
            original = text_config.get("original_max_position_embeddings") or text_config.get("max_position_embeddings")
        numbers: dict[str, Any] = {name: float(scaling[name]) for name in _NUMBERS if scaling.get(name) is not None}
        return cls(
            theta=theta,
            kind=cast(RopeKind, kind),
            original_positions=int(original) if original is not None else None,
            truncate=bool(scaling.get("truncate", True)),
            **numbers,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def scaling_fields(self) -> dict[str, Any] | None:
        """The `rope_scaling` mapping that engines and transformers 4 read; None for plain rotary positions."""
        if self.kind == "default":
            return None
        fields: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "llama3":
            fields |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.kind == "yarn":
            fields |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
            if not self.truncate:
                fields["truncate"] = False
            if self.mscale is not None and self.mscale_all_dim is not None:
                fields |= {"mscale": self.mscale, "mscale_all_dim": self.mscale_all_dim}
        if self.original_positions is not None and self.kind in ("llama3", "yarn"):
            fields["original_max_position_embeddings"] = self.original_positions
        return fields


_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies float32 [D/2] in radians per position, and the factor on cos and sin (1 except for YaRN)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / spec.theta**exponents
    if spec.kind == "default":
        return base, 1.0
    if spec.kind == "linear":
        return base / spec.factor, 1.0
    if spec.original_positions is None:
        raise ConfigError(f"rope kind {spec.kind!r} needs original_max_position_embeddings")
    if spec.kind == "llama3":
        return _llama3(spec, base, spec.original_positions), 1.0
    return _yarn(spec, base, head_dim, spec.original_positions), _yarn_magnitude(spec)


def _llama3(spec: RopeSpec, base: Tensor, original: int) -> Tensor:
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - smooth) * base / spec.factor + smooth * base
    long = wavelength > original / spec.low_freq_factor
    short = wavelength < original / spec.high_freq_factor
    return torch.where(short, base, torch.where(long, base / spec.factor, blended))


def _yarn(spec: RopeSpec, base: Tensor, head_dim: int, original: int) -> Tensor:
    def dim_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dim_of(spec.beta_fast), dim_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    interpolated = ramp.clamp(0, 1)
    return base / spec.factor * interpolated + base * (1 - interpolated)


def _yarn_magnitude(spec: RopeSpec) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * weight * math.log(spec.factor) + 1.0

    # zero counts as absent, as in transformers and in SGLang's Llama
    if spec.mscale and spec.mscale_all_dim:
        return mscale(spec.mscale) / mscale(spec.mscale_all_dim)
    return mscale(1.0)


def cos_sin(positions_M: Tensor, frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """cos and sin of M positions, float32 [M, D/2]; all heads share them."""
    angles = positions_M[:, None].float() * frequencies
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotate(x_HMD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (d, d + D/2), the layout of Llama checkpoints. Same shape and dtype as given."""
    first, second = x_HMD.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x_HMD.dtype)
