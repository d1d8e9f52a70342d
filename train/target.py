"""What training needs of the target: its config, its embedding and its head. Nothing else of it is ever read.

The two tensors are found by name in the safetensors header of any layout (one file or many, wrapped VLM names, tied
heads) and read alone: for Kimi-K2.5 that is 4.7 GB of a 1T-parameter checkpoint. No code of the checkpoint is run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from eagle3_data.errors import ConfigError
from eagle3_data.train.rope import RopeSpec

INDEX = "model.safetensors.index.json"
EMBED_ENDINGS = (
    "embed_tokens.weight",
    "word_embeddings.weight",
    "wte.weight",
    "tok_embeddings.weight",
    "embedding.weight",
)
HEAD_ENDINGS = ("lm_head.weight", "output.weight", "embed_out.weight")
NORM_ENDINGS = ("model.norm.weight", "norm.weight", "final_layernorm.weight", "norm_f.weight", "ln_f.weight")
NOT_TEXT = ("vision", "visual", "audio", "mtp", "image", "draft")
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")


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
    logit_scale: float = 1.0
    """Factor on the head's output (Cohere's logit_scale, 1 / Granite's logits_scaling)."""
    logit_softcap: float | None = None
    """Gemma-2: logits = cap * tanh(logits / cap)."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a (possibly wrapped) config; token ids and tying fall back to the outer one."""
    inner: Mapping[str, Any] = config
    for name in TEXT_PARTS:
        part = inner.get(name)
        if isinstance(part, Mapping):
            inner = text_config(part)
    outer = {name: config[name] for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id") if name in config}
    return {**outer, **inner}


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
        logit_scale=_logit_scale(text),
        logit_softcap=float(text["final_logit_softcapping"]) if text.get("final_logit_softcapping") else None,
        bos_token_id=_first(text.get("bos_token_id")),
        eos_token_id=_first(text.get("eos_token_id")),
    )


def _logit_scale(text: Mapping[str, Any]) -> float:
    if text.get("logits_scaling"):
        return 1.0 / float(text["logits_scaling"])
    return float(text.get("logit_scale") or 1.0)


def _first(value: Any) -> int | None:
    value = value[0] if isinstance(value, list) and value else value
    return int(value) if isinstance(value, int) else None


def resolve_checkpoint(model: str, *, revision: str | None = None, norm: bool = False) -> Path:
    """A local folder, or the hub snapshot's files that training needs (config, index, and the two tensors' files).

    `norm`: the final norm's file, too, which conversions between forms of the last state need.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        root = Path(snapshot_download(model, revision=revision, allow_patterns=["config.json", INDEX]))
        files = set(weight_files(root, norm=norm).values()) if (root / INDEX).exists() else {"model.safetensors"}
        for name in sorted(files):
            hf_hub_download(model, name, revision=revision)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"target {model!r} is neither a folder here nor readable from the hub ({type(error).__name__})",
            next="set target.model to a local checkpoint folder",
        ) from error
    return root


def weight_files(folder: Path, *, norm: bool = False) -> dict[str, str]:
    """{tensor name: file} of the embedding, the head (when there is one) and, when asked for, the final norm."""
    names = _all_tensors(folder)
    found = {}
    for endings in (EMBED_ENDINGS, HEAD_ENDINGS, *((NORM_ENDINGS,) if norm else ())):
        name = _pick(names, endings)
        if name is not None:
            found[name] = names[name]
    return found


def _all_tensors(folder: Path) -> dict[str, str]:
    index = folder / INDEX
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return weight_map
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no safetensors weights", next="convert the checkpoint to safetensors")
    names = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names.update(dict.fromkeys(opened.keys(), file.name))
    return names


def _pick(names: Mapping[str, str], endings: tuple[str, ...]) -> str | None:
    for ending in endings:
        fitting = [
            name
            for name in names
            if (name == ending or name.endswith(f".{ending}"))
            and ".layers." not in name
            and not any(part in name.lower() for part in NOT_TEXT)
        ]
        if fitting:
            return min(fitting, key=len)
    return None


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """`embed` [V, W] and `head` [V, W] in the checkpoint's dtype; one tensor twice when the target ties them."""

    info: TargetInfo
    embed: Tensor
    head: Tensor


def read_target_weights(folder: Path, info: TargetInfo) -> TargetWeights:
    """Only the two tensors are read. Raises ConfigError when one is missing or not of the config's shape."""
    names = _all_tensors(folder)
    embed_name = _pick(names, EMBED_ENDINGS)
    if embed_name is None:
        raise ConfigError(f"{folder}: no tensor named like {EMBED_ENDINGS[0]!r}")
    embed = _read(folder / names[embed_name], embed_name)
    head_name = None if info.tied_head else _pick(names, HEAD_ENDINGS)
    # a checkpoint that ties its head without saying so has no head tensor at all
    head = embed if head_name is None else _read(folder / names[head_name], head_name)
    for name, tensor in ((embed_name, embed), (head_name or embed_name, head)):
        if tensor.ndim != 2 or tensor.shape[1] != info.hidden_size or tensor.shape[0] < info.vocab_size:
            raise ConfigError(
                f"{folder}: {name} has shape {list(tensor.shape)}, the config says "
                f"[{info.vocab_size}, {info.hidden_size}]",
                next="quantised embeddings are not supported; use the unquantised checkpoint",
            )
    return TargetWeights(info, embed[: info.vocab_size], head[: info.vocab_size])


def read_final_norm(folder: Path, info: TargetInfo) -> Tensor:
    """Weight of the target's last RMSNorm, [W], as it is multiplied with. Raises ConfigError when there is none."""
    names = _all_tensors(folder)
    name = _pick(names, NORM_ENDINGS)
    if name is None:
        raise ConfigError(f"{folder}: no tensor named like model.{NORM_ENDINGS[0]}")
    weight = _read(folder / names[name], name)
    if weight.shape != (info.hidden_size,):
        raise ConfigError(f"{folder}: {name} has shape {list(weight.shape)}, the config says [{info.hidden_size}]")
    # Gemma stores the weight less one
    return weight.float() + 1 if info.architecture.startswith(("Gemma2", "Gemma3For", "GemmaFor")) else weight


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"{file.name}: {name} is stored as {tensor.dtype}, training needs a floating-point tensor")
    return tensor
