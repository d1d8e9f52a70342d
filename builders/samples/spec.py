"""The choices that shape samples, recorded with them: two sets with equal specs and inputs hold equal ids and masks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, cast, get_args

from eagle3_data.capture import ALIGNMENTS, DEFAULT_ALIGNMENT, Alignment
from eagle3_data.errors import ConfigError

Loss = Literal["all-assistant", "last-turn"]
Thinking = Literal["auto", "on", "off", "template"]
Reasoning = Literal["loss", "context", "drop"]
Truncation = Literal["drop", "cut"]
ToolSchemas = Literal["sglang", "sglang-0.5.14", "given"]
Dedupe = Literal["keep-first", "keep-all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpec:
    """What becomes a sample and what of it is learnt. Digests are filled in by `prepare_samples`."""

    loss: Loss = "all-assistant"
    """Which assistant turns are supervised."""
    alignment: Alignment = DEFAULT_ALIGNMENT
    """What the trainer does with the stored mask m unless told: strict m[t+1] & m[t+2], input m[t+1], legacy m[t]."""
    thinking: Thinking = "auto"
    """Mode told to templates that have a switch. auto: on for conversations with reasoning, off for the others;
    template: say nothing, so the template's own default holds."""
    reasoning: Reasoning = "loss"
    """Reasoning of supervised turns: learnt, kept as context only, or dropped from the data."""
    max_tokens: int | None = None
    """Longest sample in tokens; None: no limit."""
    truncation: Truncation = "drop"
    """For longer samples. cut: keep whole turns up to the limit; a sample that loses all it teaches is dropped."""
    dedupe: Dedupe = "keep-first"
    """For samples with equal ids and masks."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the template (`reasoning_effort`), the same that serving passes."""
    tool_schemas: ToolSchemas = "sglang"
    """Form of tool schemas in the prompt: as SGLang 0.5.23 and newer dump them, as 0.5.14 does, or as given."""
    template_digest: str = ""
    tokenizer_digest: str = ""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"samples.{name} {getattr(self, name)!r} is not one of {', '.join(choices)}")
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ConfigError(f"samples.max_tokens must be >= 2, got {self.max_tokens}")
        try:
            object.__setattr__(self, "template_kwargs", json.loads(json.dumps(dict(self.template_kwargs))))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"samples.template_kwargs must be plain JSON values: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SampleSpec:
        """Raises ConfigError on an unknown field or value, so that a typo is never a default."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(f"samples: unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}")
        return cls(**cast(dict[str, Any], dict(data)))


CHOICES: Mapping[str, tuple[str, ...]] = {
    "loss": get_args(Loss),
    "alignment": ALIGNMENTS,
    "thinking": get_args(Thinking),
    "reasoning": get_args(Reasoning),
    "truncation": get_args(Truncation),
    "dedupe": get_args(Dedupe),
    "tool_schemas": get_args(ToolSchemas),
}
