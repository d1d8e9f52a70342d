"""Would this engine load this export, and would it compute what was trained? Each finding: field, value, expected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from eagle3_data.train.engine_versions import unmet
from eagle3_data.train.engines import DRAFT_BACKEND, DRAFT_QUANTISATION, Engine, captured_by
from eagle3_data.train.spec import DraftSpec

ARCHITECTURES: dict[Engine, tuple[str, ...]] = {
    "sglang": ("LlamaForCausalLMEagle3",),
    "vllm": ("Eagle3Speculator",),
}
VLLM_AUX_LAYERS = 3
LONG_EXTRAPOLATION = 4
"""Warn when the target's position limit is more than this many times the longest sample in training."""
Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["error", "warning"]
    field: str
    value: object
    expected: str

    def __str__(self) -> str:
        return f"{self.level}: {self.field} is {self.value!r}, expected {self.expected}"


def errors_of(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "error"]


def lint(
    config: Mapping[str, Any], shapes: Shapes, spec: DraftSpec, engine: Engine, *, version: str | None = None
) -> list[Finding]:
    """All findings on a config.json and its tensors, for the draft described by `spec`.

    `version` of the engine turns what only some versions load from a warning into an error or nothing.
    """
    layer = config if engine == "sglang" else config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        return [Finding("error", "transformer_layer_config", layer, "a mapping with the draft's layer settings")]
    found = _architecture(config, engine)
    found += _layer_fields(layer, spec)
    found += _rope(layer, spec)
    found += _aux_layers(config, spec, engine)
    found += _switches(config, spec, engine)
    found += _quantisation(config)
    found += _version(spec, engine, version)
    found += _target(spec, engine)
    found += _tensors(shapes, config, spec, engine)
    if spec.trained_tokens and spec.max_positions > LONG_EXTRAPOLATION * spec.trained_tokens:
        found.append(
            Finding(
                "warning",
                "max_position_embeddings",
                spec.max_positions,
                f"acceptance may fall beyond {spec.trained_tokens} tokens, the longest sample in training; the target "
                f"goes to {spec.max_positions}",
            )
        )
    return found


def _equal(name: str, value: object, expected: object, why: str = "") -> list[Finding]:
    return [] if value == expected else [Finding("error", name, value, f"{expected!r}{why}")]


def _architecture(config: Mapping[str, Any], engine: Engine) -> list[Finding]:
    known = ARCHITECTURES[engine]
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in known:
        return []
    return [Finding("error", "architectures", names, f"[{known[0]!r}], the one {engine} knows for such a draft")]


def _layer_fields(layer: Mapping[str, Any], spec: DraftSpec) -> list[Finding]:
    found = _equal("num_hidden_layers", layer.get("num_hidden_layers"), 1, " (the draft's layers, not the target's)")
    found += _equal("hidden_size", layer.get("hidden_size"), spec.hidden_size, ", the target's")
    found += _equal("vocab_size", layer.get("vocab_size"), spec.vocab_size, ", the target's")
    for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        found += _equal(name, layer.get(name), getattr(spec, name), ", as trained")
    found += _equal("tie_word_embeddings", layer.get("tie_word_embeddings", False), False)
    found += _equal("hidden_act", layer.get("hidden_act", "silu"), "silu")
    found += _equal("attention_bias", layer.get("attention_bias", False), False)
    positions = layer.get("max_position_embeddings")
    if not isinstance(positions, int) or positions < spec.max_positions:
        found.append(
            Finding(
                "warning",
                "max_position_embeddings",
                positions,
                f"{spec.max_positions}, the target's; the server stops drafting, or refuses, beyond the smaller one",
            )
        )
    return found


def _rope(layer: Mapping[str, Any], spec: DraftSpec) -> list[Finding]:
    parameters = layer.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", layer.get("rope_theta"))
    found = _equal("rope_theta", theta, spec.rope.theta, ", the target's")
    scaling = layer.get("rope_scaling") or parameters
    kind = scaling.get("rope_type", scaling.get("type", "default")) if scaling else "default"
    found += _equal("rope_scaling.rope_type", kind, spec.rope.kind, ", as trained")
    for name, expected in (spec.rope.scaling_fields() or {}).items():
        if kind == spec.rope.kind:
            found += _equal(f"rope_scaling.{name}", scaling.get(name), expected, ", as trained")
    if spec.rope.dropped:
        found.append(
            Finding(
                "warning",
                "rope_scaling",
                None,
                f"nothing: the target's {spec.rope.dropped!r} scaling is not supported, training went without it",
            )
        )
    return found


def _aux_layers(config: Mapping[str, Any], spec: DraftSpec, engine: Engine) -> list[Finding]:
    name = "eagle_aux_hidden_state_layer_ids"
    holder = (config.get("eagle_config") or {}) if engine == "sglang" else config
    ids = holder.get(name) if isinstance(holder, Mapping) else None
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        return [Finding("error", name, ids, "a list of layer ids; without it the engine takes its own default layers")]
    captured = captured_by(engine, ids, spec.target_architecture)
    found = []
    if captured != spec.aux_layers:
        expected = (
            f"ids that capture the outputs of {list(spec.aux_layers)}; {engine} captures {list(captured)} for these"
        )
        found.append(Finding("error", name, ids, expected))
    top = max(spec.aux_layers)
    if engine == "sglang" and top > spec.target_layers - 2:
        found.append(
            Finding("error", name, ids, f"outputs up to {spec.target_layers - 2}: SGLang captures layer inputs")
        )
    if engine == "sglang" and len(spec.aux_layers) == 1:
        found.append(
            Finding("error", name, ids, "at least two layers: SGLang skips fc when the aux states are as wide as H")
        )
    if engine == "sglang" and config.get("num_aux_hidden_states") not in (None, len(ids)):
        found += _equal("num_aux_hidden_states", config.get("num_aux_hidden_states"), len(ids))
    return found


def _switches(config: Mapping[str, Any], spec: DraftSpec, engine: Engine) -> list[Finding]:
    found = []
    nested = config.get("eagle_config") or {} if engine == "sglang" else {}
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        value = bool(nested.get(name, config.get(name, False)))
        found += _equal(name, value, getattr(spec, name), ", as trained")
    if engine == "vllm":
        found += _equal("norm_before_residual", config.get("norm_before_residual", False), False, ", as trained")
        found += _equal("speculators_model_type", config.get("speculators_model_type"), "eagle3")
    if spec.sliding_window_tokens is not None:
        where = (
            "served with --speculative-draft-window-size"
            if engine == "sglang"
            else "which vLLM does not apply to drafts"
        )
        found.append(Finding("warning", "sliding_window_tokens", spec.sliding_window_tokens, where))
    return found


def _version(spec: DraftSpec, engine: Engine, version: str | None) -> list[Finding]:
    found = []
    for switch in ("norm_before_fc", "fc_norm", "norm_output"):
        need = unmet(engine, switch, version) if getattr(spec, switch) else None
        if need is not None and version is None:
            found.append(Finding("warning", switch, True, need.expected))
        elif need is not None:
            found.append(Finding("error", switch, f"True on {version}", need.expected))
    if engine == "vllm" and len(spec.aux_layers) != VLLM_AUX_LAYERS:
        expected = f"{VLLM_AUX_LAYERS} layers: vLLM's Llama draft was seen to be built for exactly as many"
        found.append(Finding("warning", "eagle_aux_hidden_state_layer_ids", list(spec.aux_layers), expected))
    return found


def _target(spec: DraftSpec, engine: Engine) -> list[Finding]:
    """What the draft needs to be told apart from its target on the command line; the printed command has it."""
    found = []
    if engine == "sglang" and spec.latent_attention:
        expected = f"{DRAFT_BACKEND} fa3, triton or flashinfer: MLA backends of the target cannot serve plain attention"
        found.append(Finding("warning", "attention backend", f"MLA in {spec.target_architecture}", expected))
    if engine == "sglang" and spec.target_quantised:
        expected = f"{DRAFT_QUANTISATION} unquant wherever --quantization is given: SGLang lets the draft inherit it"
        found.append(Finding("warning", "quantization", f"a quantised {spec.target_architecture}", expected))
    return found


def _quantisation(config: Mapping[str, Any]) -> list[Finding]:
    value = config.get("quantization_config")
    expected = "none: the tensors are not quantised, although the target may be"
    return [] if value is None else [Finding("error", "quantization_config", value, expected)]


def expected_shapes(spec: DraftSpec, engine: Engine) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all floating-point tensors of an export."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    layer = "midlayer." if engine == "sglang" else "layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, spec.aux_width),
        "norm.weight": (hidden,),
        "lm_head.weight": (spec.draft_vocab_size, hidden),
        f"{layer}hidden_norm.weight": (hidden,),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        f"{layer}self_attn.q_proj.weight": (queries, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": (keys, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": (keys, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, queries),
        f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
    }
    if spec.norm_before_fc:
        shapes["input_norm.weight"] = (spec.aux_width,)
    if spec.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(len(spec.aux_layers))}
    if engine == "vllm":
        shapes["embed_tokens.weight"] = (spec.vocab_size, hidden)
    return shapes


def _tensors(shapes: Shapes, config: Mapping[str, Any], spec: DraftSpec, engine: Engine) -> list[Finding]:
    found = []
    expected = expected_shapes(spec, engine)
    for name, shape in expected.items():
        value = shapes.get(name)
        if value is None or value[1] != shape:
            found.append(
                Finding("error", name, None if value is None else list(value[1]), f"a tensor of shape {list(shape)}")
            )
    size = config.get("draft_vocab_size")
    found += _equal("draft_vocab_size", size, spec.draft_vocab_size, ", the rows of lm_head")
    maps: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    if spec.reduced_vocab:
        maps = {"d2t": (torch.int64, (spec.draft_vocab_size,)), "t2d": (torch.bool, (spec.vocab_size,))}
    for name in ("d2t", "t2d"):
        value, wanted = shapes.get(name), maps.get(name)
        if value != wanted:
            why = f"{wanted}" if wanted else "no such tensor: the draft has the target's whole vocabulary"
            found.append(Finding("error", name, value, why))
    for name in sorted(set(shapes) - set(expected) - {"d2t", "t2d"}):
        found.append(Finding("warning", name, "present", "no such tensor; the engine ignores it or loads it elsewhere"))
    return found
