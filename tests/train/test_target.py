"""Embedding and head out of every layout a checkpoint comes in, and nothing else of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_data.capture import CaptureSpec
from eagle3_data.checkpoint import weight_files
from eagle3_data.errors import ConfigError
from eagle3_data.head import TargetHead
from eagle3_data.train.config import DraftConfig
from eagle3_data.train.spec import draft_spec
from eagle3_data.train.target import read_target_info, read_target_weights
from eagle3_data.train.teacher import Teacher

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "vocab_size": 20,
    "intermediate_size": 16,
}
EMBED, HEAD = torch.randn(20, 8), torch.randn(20, 8)


def checkpoint(folder: Path, config: dict[str, Any], files: dict[str, dict[str, torch.Tensor]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    if len(files) > 1:
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def read(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    weights = read_target_weights(folder, read_target_info(folder))
    return weights.embed, weights.head


def test_one_file(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": EMBED, "lm_head.weight": HEAD, "model.layers.0.mlp.output.weight": HEAD + 1}
    embed, head = read(checkpoint(tmp_path / "m", BASE, {"model.safetensors": tensors}))
    assert torch.equal(embed, EMBED)
    assert torch.equal(head, HEAD)


@pytest.mark.parametrize("says_so", [True, False])
def test_tied_head(tmp_path: Path, says_so: bool) -> None:
    folder = checkpoint(
        tmp_path / "m",
        {**BASE, "tie_word_embeddings": says_so},
        {"model.safetensors": {"model.embed_tokens.weight": EMBED}},
    )
    weights = read_target_weights(folder, read_target_info(folder))
    assert torch.equal(weights.head, EMBED)


@pytest.mark.parametrize("tied", [True, False])
def test_builders_and_training_take_the_same_head(tmp_path: Path, tied: bool) -> None:
    tensors = {"model.embed_tokens.weight": EMBED, "lm_head.weight": HEAD}
    folder = checkpoint(tmp_path / "m", {**BASE, "tie_word_embeddings": tied}, {"model.safetensors": tensors})
    _, head = read(folder)
    assert torch.equal(TargetHead.load(str(folder), width=8).weight, head)
    assert torch.equal(head, EMBED if tied else HEAD)
    with pytest.raises(ConfigError, match=r"the config and the states say \[20, 16\]"):
        TargetHead.load(str(folder), width=16)


def test_wrapped_vlm_in_many_files_of_which_two_are_opened(tmp_path: Path) -> None:
    """Kimi-K2.5's layout: text_config, `language_model.` names, a vision tower with an embedding of its own."""
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {
            **BASE,
            "architectures": ["DeepseekV3ForCausalLM"],
            "kv_lora_rank": 4,
            "num_attention_heads": 4,
        },
        "vision_config": {"hidden_size": 3},
        "quantization_config": {"quant_method": "compressed-tensors"},
    }
    files = {
        "model-1.safetensors": {"language_model.model.embed_tokens.weight": EMBED.bfloat16()},
        "model-2.safetensors": {"language_model.model.layers.0.mlp.gate.weight": torch.ones(2)},
        "model-3.safetensors": {"language_model.lm_head.weight": HEAD.bfloat16()},
        "model-4.safetensors": {"vision_tower.embed_tokens.weight": torch.ones(2, 3)},
    }
    folder = checkpoint(tmp_path / "kimi", config, files)
    (folder / "model-2.safetensors").write_bytes(b"not opened")
    (folder / "model-4.safetensors").write_bytes(b"not opened")
    embed, head = read(folder)
    assert torch.equal(embed, EMBED.bfloat16())
    assert torch.equal(head, HEAD.bfloat16())
    assert set(weight_files(folder).values()) == {"model-1.safetensors", "model-3.safetensors"}
    info = read_target_info(folder)
    assert (info.architecture, info.latent_attention) == ("KimiK25ForConditionalGeneration", True)
    assert info.quantised


def test_kimi_k25_draft_shape(tmp_path: Path) -> None:
    """MLA has no head width of its own for a plain attention: 128, and few key heads."""
    text = {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 163840,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    }
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    info = read_target_info(checkpoint(tmp_path / "k", config, {}))
    capture = CaptureSpec(model="k", layers=(1, 29, 57), width=7168, vocab_size=163840)
    spec = draft_spec(DraftConfig(), info, capture)
    assert (spec.head_dim, spec.num_attention_heads, spec.num_key_value_heads) == (128, 64, 8)
    assert (spec.draft_vocab_size, spec.max_positions, spec.rope.kind) == (32000, 262144, "yarn")


def test_padded_vocabulary_is_cut_to_the_configs(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.cat([EMBED, torch.zeros(4, 8)]), "lm_head.weight": HEAD}
    embed, _ = read(checkpoint(tmp_path / "m", BASE, {"model.safetensors": tensors}))
    assert torch.equal(embed, EMBED)


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_target_info(tmp_path)
    narrow = {"model.embed_tokens.weight": EMBED[:, :4].contiguous(), "lm_head.weight": HEAD}
    with pytest.raises(ConfigError, match=r"shape \[20, 4\]"):
        read(checkpoint(tmp_path / "narrow", BASE, {"model.safetensors": narrow}))
    packed = {"model.embed_tokens.weight": EMBED.to(torch.int8), "lm_head.weight": HEAD}
    with pytest.raises(ConfigError, match="int8"):
        read(checkpoint(tmp_path / "packed", BASE, {"model.safetensors": packed}))
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        read_target_info(checkpoint(tmp_path / "x", {k: v for k, v in BASE.items() if k != "num_hidden_layers"}, {}))


def test_data_of_another_target_is_refused(tmp_path: Path) -> None:
    info = read_target_info(checkpoint(tmp_path / "m", BASE, {}))
    with pytest.raises(ConfigError, match="16 wide"):
        draft_spec(DraftConfig(), info, CaptureSpec(model="m", layers=(1, 2), width=16))
    with pytest.raises(ConfigError, match="no last hidden state"):
        draft_spec(DraftConfig(), info, CaptureSpec(model="m", layers=(1, 2), width=8, last="none"))
    with pytest.raises(ConfigError, match="token ids"):
        draft_spec(DraftConfig(), info, CaptureSpec(model="m", layers=(1, 2), width=8, vocab_size=21))


def test_logit_scale_and_softcap(tmp_path: Path) -> None:
    config = {**BASE, "logits_scaling": 4.0, "final_logit_softcapping": 2.0}
    info = read_target_info(checkpoint(tmp_path / "m", config, {}))
    states = torch.randn(3, 8)
    expected = 2.0 * torch.tanh(states @ HEAD.T / 4.0 / 2.0)
    torch.testing.assert_close(Teacher(HEAD, info, torch.arange(5)).logits(states), expected)
