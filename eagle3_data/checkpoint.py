"""Finding single tensors in a checkpoint: the embedding and the head of the target. Nothing else of it is ever read.

They are found by name in the safetensors header of any layout (one file or many, wrapped VLM names, tied heads). No
code of the checkpoint is run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_data.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

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
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a (possibly wrapped) config; token ids and tying fall back to the outer one."""
    inner: Mapping[str, Any] = config
    for name in TEXT_PARTS:
        part = inner.get(name)
        if isinstance(part, Mapping):
            inner = text_config(part)
    outer = {name: config[name] for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id") if name in config}
    return {**outer, **inner}


def logit_scale(text: Mapping[str, Any]) -> float:
    """Factor on the head's output (Cohere's logit_scale, 1 / Granite's logits_scaling)."""
    if text.get("logits_scaling"):
        return 1.0 / float(text["logits_scaling"])
    return float(text.get("logit_scale") or 1.0)


def resolve_checkpoint(model: str, *, revision: str | None = None, norm: bool = False) -> Path:
    """A local folder, or the hub snapshot's files that are needed (config, index, and the two tensors' files).

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
    names = all_tensors(folder)
    found = {}
    for endings in (EMBED_ENDINGS, HEAD_ENDINGS, *((NORM_ENDINGS,) if norm else ())):
        name = pick(names, endings)
        if name is not None:
            found[name] = names[name]
    return found


def all_tensors(folder: Path) -> dict[str, str]:
    """{tensor name: file} of a checkpoint. Raises ConfigError when it has no safetensors weights."""
    index = folder / INDEX
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return weight_map
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no safetensors weights", next="convert the checkpoint to safetensors")
    from safetensors import safe_open

    names = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names.update(dict.fromkeys(opened.keys(), file.name))
    return names


def pick(names: Mapping[str, str], endings: tuple[str, ...]) -> str | None:
    """The language model's tensor with one of these endings, the first ending that is there."""
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


def read_tensor(file: Path, name: str) -> Tensor:
    """One tensor of a safetensors file. Raises ConfigError unless it is a plain floating-point one."""
    import torch
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"{file.name}: {name} is stored as {tensor.dtype}, a floating-point tensor is needed")
    return tensor


def read_rows(folder: Path, names: Mapping[str, str], name: str, *, width: int, rows: int | None) -> Tensor:
    """Tensor `name` as [rows, width], cut to the config's vocabulary (checkpoints pad it); None: all its rows.

    Raises ConfigError when it is narrower, shorter or quantised.
    """
    tensor = read_tensor(folder / names[name], name)
    if tensor.ndim != 2 or tensor.shape[1] != width or (rows is not None and tensor.shape[0] < rows):
        wanted = f"[{rows}, {width}]" if rows is not None else f"[vocabulary, {width}]"
        raise ConfigError(
            f"{folder}: {name} has shape {list(tensor.shape)}, the config and the states say {wanted}",
            next="the unquantised checkpoint of the model that the data was captured from",
        )
    return tensor[:rows]


def read_head(folder: Path, text: Mapping[str, Any], *, width: int) -> tuple[Tensor, str]:
    """The target's head [V, W] and its tensor's name; the embedding's when they are tied. Only this tensor is read.

    `text`: the language model's config. A checkpoint that ties its head without saying so has no head tensor at all.
    """
    names = all_tensors(folder)
    name = None if text.get("tie_word_embeddings") else pick(names, HEAD_ENDINGS)
    name = name or pick(names, EMBED_ENDINGS)
    if name is None:
        raise ConfigError(f"{folder} has neither a head nor an embedding", next="give the target's whole checkpoint")
    rows = int(text["vocab_size"]) if text.get("vocab_size") else None
    return read_rows(folder, names, name, width=width, rows=rows), name
