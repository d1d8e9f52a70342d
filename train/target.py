"""What training needs of the target: its config, its embedding and its head. Nothing else of it is ever read.

The two tensors are found by name in the safetensors header of any layout (one file or many, wrapped VLM names, tied
heads) and read alone: for Kimi-K2.5 that is 4.7 GB of a 1T-parameter checkpoint. No code of the checkpoint is run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3_data.checkpoint import (
    EMBED_ENDINGS,
    NORM_ENDINGS,
    TEXT_PARTS,
    all_tensors,
    logit_scale,
    pick,
    read_head,
    read_rows,
    read_tensor,
    text_config,
)
from eagle3_data.errors import ConfigError
from eagle3_data.train.rope import RopeSpec

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetInfo:
    """The fields of a target's config.json that a draft follows."""

    model: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeSpec
    tied_head: bool
    latent_attention: bool
    """MLA (DeepSeek-V2/V3, Kimi-K2): no usable head_dim or kv heads for a plain attention."""
    quantised: bool = False
    """The checkpoint has a quantization_config; embedding and head are read only when they are left out of it."""
    logit_scale: float = 1.0
    """Factor on the head's output (Cohere's logit_scale, 1 / Granite's logits_scaling)."""
    logit_softcap: float | None = None
    """Gemma-2: logits = cap * tanh(logits / cap)."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None


def read_target_info(folder: Path, *, model: str | None = None) -> TargetInfo:
    """From `{folder}/config.json`. Raises ConfigError naming a field that is missing."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the target's {path}: {error}", next="set target.model to a checkpoint"
        ) from None
    text = text_config(config)
    missing = [name for name in NEEDED if name not in text]
    if missing:
        raise ConfigError(f"{path} has no {missing[0]!r}, neither at its top nor in {', '.join(TEXT_PARTS)}")
    heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
    latent = text.get("kv_lora_rank") is not None
    architectures = config.get("architectures") or text.get("architectures") or [""]
    return TargetInfo(
        model=model or str(folder),
        architecture=str(architectures[0]),
        num_layers=int(text["num_hidden_layers"]),
        hidden_size=hidden,
        intermediate_size=int(text.get("intermediate_size") or 4 * hidden),
        num_attention_heads=heads,
        num_key_value_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        vocab_size=int(text["vocab_size"]),
        max_positions=int(text.get("max_position_embeddings") or 2048),
        rms_norm_eps=float(text.get("rms_norm_eps") or 1e-6),
        rope=RopeSpec.from_config(text),
        tied_head=bool(text.get("tie_word_embeddings", False)),
        latent_attention=latent,
        quantised=bool(config.get("quantization_config") or text.get("quantization_config")),
        logit_scale=logit_scale(text),
        logit_softcap=float(text["final_logit_softcapping"]) if text.get("final_logit_softcapping") else None,
        bos_token_id=_first(text.get("bos_token_id")),
        eos_token_id=_first(text.get("eos_token_id")),
    )


def _first(value: Any) -> int | None:
    value = value[0] if isinstance(value, list) and value else value
    return int(value) if isinstance(value, int) else None


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """`embed` [V, W] and `head` [V, W] in the checkpoint's dtype; one tensor twice when the target ties them."""

    info: TargetInfo
    embed: Tensor
    head: Tensor


def read_target_weights(folder: Path, info: TargetInfo) -> TargetWeights:
    """Only the two tensors are read. Raises ConfigError when one is missing or not of the config's shape."""
    names = all_tensors(folder)
    embed_name = pick(names, EMBED_ENDINGS)
    if embed_name is None:
        raise ConfigError(f"{folder}: no tensor named like {EMBED_ENDINGS[0]!r}")
    embed = read_rows(folder, names, embed_name, width=info.hidden_size, rows=info.vocab_size)
    text = {"tie_word_embeddings": info.tied_head, "vocab_size": info.vocab_size}
    head, head_name = read_head(folder, text, width=info.hidden_size)
    return TargetWeights(info, embed, embed if head_name == embed_name else head)


def read_final_norm(folder: Path, info: TargetInfo) -> Tensor:
    """Weight of the target's last RMSNorm, [W], as it is multiplied with. Raises ConfigError when there is none."""
    names = all_tensors(folder)
    name = pick(names, NORM_ENDINGS)
    if name is None:
        raise ConfigError(f"{folder}: no tensor named like model.{NORM_ENDINGS[0]}")
    weight = read_tensor(folder / names[name], name)
    if weight.shape != (info.hidden_size,):
        raise ConfigError(f"{folder}: {name} has shape {list(weight.shape)}, the config says [{info.hidden_size}]")
    # Gemma stores the weight less one
    return weight.float() + 1 if info.architecture.startswith(("Gemma2", "Gemma3For", "GemmaFor")) else weight
