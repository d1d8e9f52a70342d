"""Drafts that SpecForge or speculators trained, as checkpoints of ours: to evaluate, export or go on training them.

Read are a folder with config.json and safetensors (SGLang's form, which SpecForge exports, or speculators'), or
SpecForge's own `training_state.pt` with its draft config. Torch files are read with the restricted loader.
What would be computed differently from how the engine reads the config is refused, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3_data.errors import ConfigError, TrainingError
from eagle3_data.protocol import default_aux_layers
from eagle3_data.train.checkpoint import DRAFT, SPEC, write_checkpoint
from eagle3_data.train.engines import Engine, captured_by
from eagle3_data.train.lint import ARCHITECTURES, expected_shapes
from eagle3_data.train.rope import RopeSpec
from eagle3_data.train.serving import Serving
from eagle3_data.train.spec import DraftSpec
from eagle3_data.train.target import TargetInfo
from eagle3_data.train.vocab import map_from_d2t

TRAINING_STATE = "training_state.pt"
IGNORED = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
"""The target's own tensors, and tables that are computed."""


@dataclass(frozen=True, slots=True)
class ImportedDraft:
    folder: Path
    spec: DraftSpec
    form: str
    """'specforge' or 'speculators'."""


@dataclass(frozen=True, slots=True)
class ForeignDraft:
    engine: Engine
    """Whose form its config has."""
    spec: DraftSpec
    tensors: dict[str, Tensor]
    """float32, under our names, with `d2t` and `t2d` for a reduced vocabulary."""


def is_draft(folder: Path) -> bool:
    return (folder / TRAINING_STATE).exists() or (
        (folder / "config.json").exists() and next(folder.glob("*.safetensors"), None) is not None
    )


def import_draft(source: Path, out: Path, *, target: TargetInfo, draft_config: Path | None = None) -> ImportedDraft:
    """Write `out` as a checkpoint of ours. Raises ConfigError or TrainingError naming the field or tensor at fault."""
    if out.exists() and {path.name for path in out.iterdir()} not in (set(), {DRAFT, SPEC}):
        raise ConfigError(f"{out} holds something else than an imported draft", next="name another folder with --out")
    found = read_foreign(source, target, draft_config=draft_config)
    write_checkpoint(out, found.spec, None, {DRAFT: found.tensors})
    return ImportedDraft(out, found.spec, "speculators" if found.engine == "vllm" else "specforge")


def read_foreign(source: Path, target: TargetInfo, *, draft_config: Path | None = None) -> ForeignDraft:
    """Raises as `import_draft` does."""
    config = _read_config(draft_config or source / "config.json")
    engine = _engine_of(config)
    tensors = {name.replace("layers.0.", "midlayer.", 1): t for name, t in _read_tensors(source).items()}
    # SpecForge's own `norm_output` is the norm before lm_head, which all drafts have; SGLang's feeds it back
    trainer = (source / TRAINING_STATE).exists()
    spec = spec_of(config, tensors, engine, target, trainer_config=trainer)
    spec = replace(spec, sliding_window_tokens=Serving.read(source).sliding_window_tokens)
    weights = _checked(tensors, spec, source)
    if spec.reduced_vocab:
        vocab = map_from_d2t(_needed(tensors, "d2t", source), spec.vocab_size)
        weights |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    return ForeignDraft(engine, spec, weights)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", next="--draft-config: the draft's config.json") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a mapping")
    return config


def _engine_of(config: Mapping[str, Any]) -> Engine:
    names = config.get("architectures") or []
    for engine, known in ARCHITECTURES.items():
        if any(name in known for name in names):
            return engine
    if config.get("speculators_model_type") == "eagle3":
        return "vllm"
    known_names = ", ".join(name for known in ARCHITECTURES.values() for name in known)
    raise ConfigError(f"architectures is {names}, an EAGLE-3 draft has one of {known_names}")


def _read_tensors(source: Path) -> dict[str, Tensor]:
    if (source / TRAINING_STATE).exists():
        try:
            state = torch.load(source / TRAINING_STATE, map_location="cpu", weights_only=True, mmap=True)
            return dict(state["draft_state_dict"])
        except Exception as error:  # torch's reader has no family of errors of its own
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise TrainingError(
                f"{source / TRAINING_STATE} is not readable as tensors alone: {first[:200]}",
                next="export it with SpecForge (specforge export --to sglang) and import that",
            ) from error
    tensors: dict[str, Tensor] = {}
    try:
        for file in sorted(source.glob("*.safetensors")):
            tensors |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{source}: {error}") from error
    return tensors


def spec_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    engine: Engine,
    target: TargetInfo,
    *,
    trainer_config: bool = False,
) -> DraftSpec:
    """The draft that this config describes, as the engine reads it. Raises ConfigError for what we do not compute."""
    layer = config.get("transformer_layer_config", config) if engine == "vllm" else config
    nested = config.get("eagle_config") or {}
    for name, value, expected in (
        ("num_hidden_layers", layer.get("num_hidden_layers", 1), 1),
        ("hidden_act", layer.get("hidden_act", "silu"), "silu"),
        ("attention_bias", bool(layer.get("attention_bias", False)), False),
        ("norm_before_residual", bool(config.get("norm_before_residual", False)), False),
        ("hidden_size", layer.get("hidden_size"), target.hidden_size),
        ("target_hidden_size", config.get("target_hidden_size") or target.hidden_size, target.hidden_size),
        ("vocab_size", layer.get("vocab_size"), target.vocab_size),
    ):
        if value != expected:
            raise ConfigError(f"the draft's {name} is {value!r}, only {expected!r} can be imported")
    heads, hidden = int(layer["num_attention_heads"]), target.hidden_size
    aux = _needed(tensors, "fc.weight", Path("the draft")).shape[1] // hidden
    ids = nested.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    # speculators may list the last layer, too: the one that the targets come from
    layers = captured_by(engine, ids[:aux], target.architecture) if ids else default_aux_layers(target.num_layers)
    if len(layers) != aux:
        raise ConfigError(f"fc takes {aux} aux states, the config names {list(layers)}")
    switches = {
        name: bool(nested.get(name, config.get(name, False))) for name in ("norm_before_fc", "fc_norm", "norm_output")
    }
    if trainer_config:
        if not config.get("norm_output", True):
            raise ConfigError("the draft's norm_output is false: SpecForge trained it without the norm before lm_head")
        switches["norm_output"] = False
    return DraftSpec(
        target_model=target.model,
        target_architecture=target.architecture,
        target_layers=target.num_layers,
        hidden_size=hidden,
        aux_layers=tuple(layers),
        intermediate_size=int(layer["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(layer.get("num_key_value_heads") or heads),
        head_dim=int(layer.get("head_dim") or hidden // heads),
        vocab_size=target.vocab_size,
        draft_vocab_size=int(config.get("draft_vocab_size") or target.vocab_size),
        rms_norm_eps=float(layer.get("rms_norm_eps") or target.rms_norm_eps),
        max_positions=int(layer.get("max_position_embeddings") or target.max_positions),
        rope=RopeSpec.from_config(layer),
        latent_attention=target.latent_attention,
        target_quantised=target.quantised,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        **switches,
    )


def _checked(tensors: Mapping[str, Tensor], spec: DraftSpec, source: Path) -> dict[str, Tensor]:
    """Every tensor of the draft in float32, and none that the draft would have to use and does not know."""
    wanted = expected_shapes(spec, "sglang")
    for name, shape in wanted.items():
        found = _needed(tensors, name, source)
        if tuple(found.shape) != shape:
            raise TrainingError(f"{source}: {name} has shape {list(found.shape)}, the config says {list(shape)}")
    strange = [name for name in tensors if name not in wanted and not name.endswith((*IGNORED, "d2t", "t2d"))]
    if strange:
        raise TrainingError(f"{source}: tensor {strange[0]} belongs to a kind of draft that is not supported")
    return {name: tensors[name].float().contiguous() for name in wanted}


def _needed(tensors: Mapping[str, Tensor], name: str, source: Path) -> Tensor:
    if name not in tensors:
        raise TrainingError(f"{source}: tensor {name} is missing")
    return tensors[name]
