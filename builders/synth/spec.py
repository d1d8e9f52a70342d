"""How answers are asked for; written beside them, so that a resume cannot mix two ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from eagle3_data.builders.samples.spec import SampleSpec, Thinking
from eagle3_data.errors import ConfigError
from eagle3_data.server.client import Sampling

Truncated = Literal["keep", "drop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthSpec:
    """Sampling, mode and policy of one answers file."""

    temperature: float = 0.0
    """0: the target's own choice at every step, which is what a draft must learn to foresee."""
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 1024
    """Longest answer in tokens."""
    seed: int | None = None
    """Row i is asked for with seed + i; servers honour it in deterministic mode."""
    thinking: Thinking = "template"
    """Mode told to templates that have a switch; `auto` looks at the turn that is answered anew."""
    truncated: Truncated = "keep"
    """For answers that reached `max_new_tokens`: kept without a turn end, or counted as failed."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    template_digest: str = ""
    tokenizer_digest: str = ""

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1:
            raise ConfigError(
                f"synth: temperature {self.temperature} must be >= 0, top_p {self.top_p} in (0, 1], "
                f"max_new_tokens {self.max_new_tokens} >= 1"
            )
        if self.truncated not in get_args(Truncated):
            raise ConfigError(f"synth.truncated {self.truncated!r} is not one of {', '.join(get_args(Truncated))}")
        self.sample_spec()  # checks the fields that it shares

    def sampling(self, row: int) -> Sampling:
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=None if self.seed is None else self.seed + row,
        )

    def sample_spec(self) -> SampleSpec:
        """The rendering half of this spec."""
        return SampleSpec(thinking=self.thinking, template_kwargs=self.template_kwargs)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "template_kwargs": dict(self.template_kwargs)}
