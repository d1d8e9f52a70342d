"""Frequencies against transformers' own, and the fields of a target's config in all their forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3_data.train.rope import RopeSpec, cos_sin, inverse_frequencies

CASES: list[dict[str, Any]] = [
    {"rope_theta": 10000.0},
    {"rope_theta": 50000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    {  # Kimi-K2's
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
    {  # gpt-oss's
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
]


@pytest.mark.parametrize("fields", CASES, ids=lambda f: str((f.get("rope_scaling") or {}).get("rope_type", "default")))
def test_equals_transformers(fields: dict[str, Any]) -> None:
    spec = RopeSpec.from_config({**fields, "max_position_embeddings": 131072})
    config = LlamaConfig.from_dict(
        {
            "hidden_size": 128,
            "num_attention_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_theta": spec.theta,
            "rope_scaling": spec.scaling_fields(),
        }
    )
    positions = torch.tensor([[0, 1, 100, 5000, 100000]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    frequencies, magnitude = inverse_frequencies(spec, 64)
    ours = cos_sin(positions[0], frequencies, magnitude)
    torch.testing.assert_close(ours[0], cos[0, :, :32], rtol=1e-4, atol=5e-3)  # float32 angles of 1e5 radians
    torch.testing.assert_close(ours[1], sin[0, :, :32], rtol=1e-4, atol=5e-3)


def test_new_and_old_forms_are_one() -> None:
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0}, "max_position_embeddings": 64}
    old = {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 64}
    per_layer = {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0},
        },
        "max_position_embeddings": 64,
    }
    assert RopeSpec.from_config(new) == RopeSpec.from_config(old) == RopeSpec.from_config(per_layer)
    assert RopeSpec.from_config({}) == RopeSpec()


def test_unsupported_scaling_is_named_and_positions_of_a_vlm_are_plain() -> None:
    assert RopeSpec.from_config({"rope_scaling": {"type": "longrope", "factor": 2.0}}).dropped == "longrope"
    mrope = RopeSpec.from_config({"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}})
    assert (mrope.kind, mrope.theta, mrope.dropped) == ("default", 1e6, None)
