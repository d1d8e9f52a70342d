"""Tiny random float32 checkpoints with a tokenizer, made once per machine and kept in the temporary folder."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

RECIPE = "2"
"""Part of the cache's name: raise it when anything below changes what is made."""

LAYERS, WIDTH, HEADS, KV_HEADS, VOCAB, CONTEXT = 8, 64, 4, 2, 768, 4096

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cache_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"eagle3-data-tests-{os.getuid()}-{RECIPE}"
    folder.mkdir(exist_ok=True)
    return folder


def tiny_model(kind: str) -> Path:
    """Folder of the `llama` or `qwen3` checkpoint; made now if it is not there."""
    folder = cache_folder() / f"tiny-{kind}"
    with locked(cache_folder() / f"{kind}.lock"):
        if not folder.exists():
            hidden = folder.with_name(f".{folder.name}.{os.getpid()}")
            try:
                _make(kind, hidden)
                hidden.rename(folder)
            finally:
                shutil.rmtree(hidden, ignore_errors=True)
    return folder


def _make(kind: str, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class: Any = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind]
    model_class: Any = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}[kind]
    _make_tokenizer(folder)
    torch.manual_seed(len(kind))
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=CONTEXT,
        initializer_range=0.08,  # spread enough for states and next tokens of different prompts to differ clearly
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    model_class(config).to(torch.float32).save_pretrained(folder)


def _make_tokenizer(folder: Path) -> None:
    """Byte-level BPE: complete for any UTF-8 text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = [
        f"the quick brown fox jumps over the lazy dog {i} times, and some more words are made here" for i in range(500)
    ]
    special = ["<s>", "</s>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = CONTEXT
    fast.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that transformers 4 and 5 both know
    path.write_text(json.dumps(config, indent=1))


@dataclass(frozen=True)
class Expected:
    """What transformers says of one prompt. T tokens, H layers + 1."""

    hidden: tuple[torch.Tensor, ...]
    """H tensors [T, width]; entry k+1 is the output of layer k, the last is after the final norm"""
    logits: torch.Tensor
    """[T, vocabulary]"""

    def aux(self, layers: Sequence[int]) -> torch.Tensor:
        """[T, L*width]"""
        return torch.cat([self.hidden[layer + 1] for layer in layers], -1)


@functools.lru_cache(maxsize=2)
def _reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def expected_states(folder: Path, input_ids: Sequence[int]) -> Expected:
    """transformers' own states for one prompt, float32 on the CPU."""
    out = _reference(folder)(torch.tensor([list(input_ids)]), output_hidden_states=True)
    return Expected(tuple(state[0] for state in out.hidden_states), out.logits[0])
