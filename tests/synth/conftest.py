"""One real SGLang server on the CPU for all tests here: a tiny Llama whose tokenizer knows every format's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3_data.server.process import ServerConfig, ServerProcess
from tests.samples.kit import TARGETS, TEMPLATES, make_tokenizer

VOCABULARY = 1024

EXTRA = ("--trust-request-chat-template",)
"""One server renders with every template."""


@pytest.fixture(scope="session")
def every_tokenizer() -> PreTrainedTokenizerFast:
    """The special tokens of all targets; ChatML ends a turn."""
    specials = dict.fromkeys(token for target in TARGETS.values() for token in target.specials)
    template = (TEMPLATES / "qwen3.jinja").read_text()
    return make_tokenizer([*specials], "<|begin_of_text|>", "<|im_end|>", template)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, every_tokenizer: PreTrainedTokenizerFast) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    every_tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=every_tokenizer.bos_token_id,
        eos_token_id=every_tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        model.lm_head.weight[len(every_tokenizer) :] = 0  # ids that no text has are never the best ones
        model.lm_head.weight *= 8  # well apart, so that the best token is the same in every batch
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[str]:
    with ServerProcess(ServerConfig(model=str(tiny_model), device="cpu", dtype="float32", extra_args=EXTRA)) as process:
        yield process.url
