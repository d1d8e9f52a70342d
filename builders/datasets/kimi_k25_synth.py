"""Kimi-K2.5 answering 37,312 conversations (87.8 M tokens): outputs of layers 1, 29, 57 and the last state, bf16."""

from __future__ import annotations

from eagle3_data.builders.hf import Eagle3Builder, configs
from eagle3_data.builders.recipe import Recipe
from eagle3_data.capture import CaptureSpec

RECIPE = Recipe(
    name="kimi_k25_synth",
    summary="Hidden states of Kimi-K2.5 on its own answers, for EAGLE-3 draft training.",
    capture=CaptureSpec(
        model="moonshotai/Kimi-K2.5", layers=(1, 29, 57), width=7168, dtype="bfloat16", vocab_size=163_840
    ),
    num_layers=61,
    context_length=262_144,
)


class KimiK25Synth(Eagle3Builder):
    RECIPE = RECIPE
    BUILDER_CONFIGS = configs(RECIPE)
