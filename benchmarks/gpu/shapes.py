"""Model folders with real shapes and no weights, for `--load-format dummy`: config.json and a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Kimi-K2.5's language model: its width, attention and expert sizes; fewer layers (of 61) and experts (of 384)."""
KIMI_K25: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": DEEPSEEK_V3,
    "vision_config": {
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_hidden_layers": 2,
        "vt_num_attention_heads": 16,
        "text_hidden_size": 7168,
        "mm_hidden_size": 1152,
    },
    "tie_word_embeddings": False,
}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": False,
}
DEEPSEEK_SMALL = DEEPSEEK_V3 | {"num_hidden_layers": 7, "n_routed_experts": 8, "num_experts_per_tok": 4}
"""Small enough to be written down with real (random) weights: about 10 GB."""
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_small": DEEPSEEK_SMALL,
    "llama_8b": LLAMA_8B,
    "kimi_k25": KIMI_K25,
    "deepseek_v3": DEEPSEEK_V3,
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
    "tiny": TINY,
}
KIMI_PROCESSOR = '''"""Stands in for Kimi's image processor, which comes with the real checkpoint."""
from types import SimpleNamespace

from transformers import AutoTokenizer


class TextOnly:
    def __init__(self, tokenizer):
        self.tokenizer, self.image_processor = tokenizer, None
        sizes = {"patch_size": 14, "merge_kernel_size": [2, 2], "in_patch_limit": 16384, "patch_limit_on_one_side": 512}
        scale = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        self.media_processor = SimpleNamespace(media_proc_cfg={**sizes, **scale})

    @classmethod
    def from_pretrained(cls, folder, *_, **__):
        return cls(AutoTokenizer.from_pretrained(folder))

    @classmethod
    def register_for_auto_class(cls, *_):
        pass
'''
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(name: str, folder: Path, *, dtype: str) -> Path:
    """`folder/NAME` with config and tokenizer of one shape; made anew each time."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES[name], "torch_dtype": dtype, "bos_token_id": 0, "eos_token_id": 1}
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    special = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    if SHAPES[name]["model_type"] == "kimi_k25":
        (path / "text_only.py").write_text(KIMI_PROCESSOR)
        mapped = {"processor_class": "TextOnly", "auto_map": {"AutoProcessor": "text_only.TextOnly"}}
        (path / "processor_config.json").write_text(json.dumps(mapped))
    return path


def make_weights(path: Path, *, device: str, dtype: str) -> None:
    """Random weights into a folder of `make_model`, the same for every server that loads it.

    Dummy weights will not do to compare servers of different tensor parallelism: SGLang seeds them per parameter as it
    is partitioned, so each way of partitioning is another model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = (path / "config.json").read_text()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=getattr(torch, dtype))
    model.save_pretrained(path)
    (path / "config.json").write_text(config)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


def text_config(name: str) -> dict[str, Any]:
    """The language model's part of a shape."""
    found: dict[str, Any] = SHAPES[name].get("text_config", SHAPES[name])
    return found
