"""A trained draft as SGLang and vLLM load it, both from one `DraftSpec`; linted before it gets its name.

SGLang: `LlamaForCausalLMEagle3`, tensors under `midlayer.`, embedding taken from the target at load time.
vLLM:   speculators' `Eagle3Speculator`, tensors under `layers.0.`, embedding included, layer ids as inputs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_data import durable
from eagle3_data.checkpoint import resolve_checkpoint
from eagle3_data.errors import ConfigError, TrainingError
from eagle3_data.train.checkpoint import SavedDraft, read_draft
from eagle3_data.train.engines import Engine, engine_layers, launch_command
from eagle3_data.train.lint import Finding, errors_of, lint
from eagle3_data.train.serving import SERVING, Serving
from eagle3_data.train.spec import DraftSpec
from eagle3_data.train.target import read_target_info, read_target_weights

WEIGHTS, CONFIG = "model.safetensors", "config.json"
SPECULATORS_VERSION = "0.4.0"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DtypeName = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True)
class Export:
    folder: Path
    engine: Engine
    warnings: list[Finding]
    command: str
    """How to serve it."""


def layer_config(spec: DraftSpec, dtype: DtypeName) -> dict[str, Any]:
    """Fields of a one-layer Llama, in transformers' older form (`rope_theta`, `rope_scaling`), which every version of
    transformers and both engines read."""
    return {
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope.theta,
        "rope_scaling": spec.rope.scaling_fields(),
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def sglang_config(spec: DraftSpec, dtype: DtypeName) -> dict[str, Any]:
    eagle = {
        "eagle_aux_hidden_state_layer_ids": engine_layers("sglang", spec.aux_layers, spec.target_architecture),
        "use_aux_hidden_state": True,
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(spec, dtype),
        "draft_vocab_size": spec.draft_vocab_size,
        "num_aux_hidden_states": len(spec.aux_layers),
        "target_hidden_size": spec.hidden_size,
        "eagle_config": eagle,
    }
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if getattr(spec, name):
            config[name] = True
    return config


def vllm_config(spec: DraftSpec, dtype: DtypeName, *, target: str, draft_tokens: int) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": layer_config(spec, dtype),
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": None,
        "norm_before_residual": False,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": engine_layers("vllm", spec.aux_layers, spec.target_architecture),
        "has_no_defaults_at_init": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": draft_tokens,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": [spec.target_architecture]},
        },
    }


def export_tensors(spec: DraftSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights in `dtype`, and d2t int64 [D], t2d bool [V] when the vocabulary is reduced."""
    out = {name: t.to(dtype).contiguous() for name, t in tensors.items() if name not in ("d2t", "t2d")}
    if spec.reduced_vocab:
        out |= {"d2t": tensors["d2t"].to(torch.int64), "t2d": tensors["t2d"].to(torch.bool)}
    return out


def export_draft(
    source: Path,
    out: Path,
    *,
    engine: Engine = "sglang",
    dtype: DtypeName = "bfloat16",
    target: str | None = None,
    draft_tokens: int = 3,
    version: str | None = None,
) -> Export:
    """Write the draft of a checkpoint or run folder as `out`. Raises TrainingError when the linter finds an error.

    `target`: its name where it is served; `version`: of the engine there, for the linter.
    """
    saved = read_draft(source)
    spec = saved.spec
    model = target or spec.target_model
    tensors = export_tensors(spec, saved.tensors, DTYPES[dtype])
    if engine == "vllm":
        config = vllm_config(spec, dtype, target=model, draft_tokens=draft_tokens)
        tensors = {name.replace("midlayer.", "layers.0.", 1): t for name, t in tensors.items()}
        tensors["embed_tokens.weight"] = _embedding(saved, target).to(DTYPES[dtype]).contiguous()
    else:
        config = sglang_config(spec, dtype)
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    findings = lint(config, shapes, spec, engine, version=version)
    findings += lint_vocab_map(tensors, spec)
    errors = errors_of(findings)
    if errors:
        raise TrainingError(f"{engine} would not load this export:\n  " + "\n  ".join(map(str, errors)))
    _write(out, config, Serving.of(spec, engine), tensors)
    command = launch_command(
        engine,
        target=model,
        draft=str(out),
        draft_tokens=draft_tokens,
        spec=spec,
    )
    return Export(out, engine, [finding for finding in findings if finding.level == "warning"], command)


def _embedding(saved: SavedDraft, served_as: str | None) -> Tensor:
    """Of the target that the draft was trained for; where that is gone, of the one it will be served with."""
    try:
        folder = resolve_checkpoint(saved.spec.target_model)
    except ConfigError:
        if served_as is None:
            raise
        folder = resolve_checkpoint(served_as)
    return read_target_weights(folder, read_target_info(folder)).embed


def _refuse_to_replace(out: Path) -> None:
    """Raises ConfigError when `out` holds anything that an export did not write."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if out.is_dir() and {path.name for path in out.iterdir()} == {WEIGHTS, CONFIG, SERVING}:
        return
    raise ConfigError(f"{out} exists and is not an exported draft alone", next="name another folder with --out")


def _write(out: Path, config: Mapping[str, Any], serving: Serving, tensors: Mapping[str, Tensor]) -> None:
    _refuse_to_replace(out)
    hidden = durable.hidden(out)
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    save_file(dict(tensors), hidden / WEIGHTS, metadata={"format": "pt"})
    (hidden / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    (hidden / SERVING).write_text(serving.to_json())
    for path in hidden.iterdir():
        durable.fsync_file(path)
    if out.exists():
        shutil.rmtree(out)
    os.replace(hidden, out)
    durable.fsync_dir(out.parent)


def lint_vocab_map(tensors: Mapping[str, Tensor], spec: DraftSpec) -> list[Finding]:
    """d2t must be the offset form of exactly the ids that t2d marks."""
    if "d2t" not in tensors or "t2d" not in tensors:
        return []
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    marked = tensors["t2d"].nonzero().flatten()
    if len(ids) == len(marked) and bool((ids == marked).all()):
        return []
    return [
        Finding("error", "d2t", "ids that differ from t2d's", "i + d2t[i] = position of the i-th true entry of t2d")
    ]


def lint_folder(folder: Path, spec: DraftSpec, engine: Engine) -> list[Finding]:
    """Check an export on disk, of ours or of anybody else, against the target it is for."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is not an exported draft: {error}") from error
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    return lint(config, shapes, spec, engine) + lint_vocab_map(tensors, spec)
