"""What a draft begins with instead of fresh weights: another draft (`draft.init_from`), read with what it is.

Equal shapes do not make an equal draft: switches, heads and rotary settings decide what the same weights compute.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from eagle3_data.errors import ConfigError, TrainingError
from eagle3_data.train.checkpoint import checkpoints, find_draft, load_draft, read_draft
from eagle3_data.train.config import TrainConfig
from eagle3_data.train.draft import Eagle3Draft
from eagle3_data.train.foreign_drafts import is_draft, read_foreign
from eagle3_data.train.spec import DraftSpec
from eagle3_data.train.target import TargetInfo
from eagle3_data.train.vocab import VocabMap
from eagle3_data.train.vocab_choice import move_head

SETTINGS = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "sliding_window_tokens",
)
"""Fields of the spec that `draft` in the configuration names alike."""


@dataclass(frozen=True, slots=True)
class Warm:
    """A draft to begin with."""

    source: Path
    spec: DraftSpec
    tensors: dict[str, Tensor]
    """Under the names of our checkpoints."""

    def adapted(self, spec: DraftSpec, say: Callable[[str], None]) -> DraftSpec:
        """`spec`, and of this draft what no setting decides. Raises ConfigError naming a setting that differs."""
        for name in SETTINGS:
            theirs, ours = getattr(self.spec, name), getattr(spec, name)
            if theirs != ours:
                raise ConfigError(
                    f"draft.init_from {self.source}: its {name} is {theirs!r}, this configuration's is {ours!r}",
                    next=f"set draft.{name}: {json.dumps(theirs)}",
                )
        if self.spec.aux_layers != spec.aux_layers:
            raise ConfigError(
                f"draft.init_from {self.source}: the draft takes outputs of layers {list(self.spec.aux_layers)}, "
                f"the data has {list(spec.aux_layers)}",
                next="build data with these layers (--layers), or train without draft.init_from",
            )
        for name in ("rope", "rms_norm_eps"):
            if getattr(self.spec, name) != getattr(spec, name):
                say(f"{name} is the draft's own ({getattr(self.spec, name)}), not the target's ({getattr(spec, name)})")
        return replace(spec, rope=self.spec.rope, rms_norm_eps=self.spec.rms_norm_eps)

    def load(self, draft: Eagle3Draft, vocab: VocabMap, *, new_map: bool) -> None:
        """Copy the weights; `new_map`: rows of `lm_head` go to where `vocab` has their tokens."""
        tensors = dict(self.tensors)
        if new_map and "lm_head.weight" in tensors:
            start = draft.lm_head.weight.detach()
            tensors["lm_head.weight"] = move_head(tensors["lm_head.weight"], tensors.get("d2t"), vocab, start)
        load_draft(draft, tensors, self.source)


def read_warm(config: TrainConfig, target: TargetInfo) -> Warm | None:
    """The draft of `draft.init_from`, None without one. Raises ConfigError when there is none at that place.

    A run that goes on reads its own checkpoint instead, of the same map and settings: the other folder may be gone.
    """
    path = config.draft.init_from
    if path is None:
        return None
    own = checkpoints(config.run.output)
    if own and config.run.resume:
        path = own[-1]
    try:
        find_draft(path)
    except TrainingError:
        if not is_draft(path):
            raise ConfigError(
                f"draft.init_from: {path} is neither a run folder, a checkpoint nor an export of a draft"
            ) from None
        foreign = read_foreign(path, target)
        return Warm(path, foreign.spec, foreign.tensors)
    saved = read_draft(path)
    return Warm(path, saved.spec, saved.tensors)
