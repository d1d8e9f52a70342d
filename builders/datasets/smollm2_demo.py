"""SmolLM2-135M-Instruct answering the prompts shipped with this package; `make demo` builds it in minutes on a CPU."""

from __future__ import annotations

from pathlib import Path

from eagle3_data.builders.hf import Eagle3Builder, configs
from eagle3_data.builders.recipe import Recipe
from eagle3_data.capture import CaptureSpec
from eagle3_data.protocol import default_aux_layers

RECIPE = Recipe(
    name="smollm2_demo",
    summary="Hidden states of SmolLM2-135M-Instruct on its own answers: the demo, small and complete.",
    capture=CaptureSpec(
        model="SmolLM2-135M-Instruct", layers=default_aux_layers(30), width=576, dtype="float32", vocab_size=49_152
    ),
    num_layers=30,
    context_length=8192,
    prompts=Path(__file__).with_name("smollm2_demo_prompts.jsonl"),
    shard_bytes=16 << 20,
)


class Smollm2Demo(Eagle3Builder):
    RECIPE = RECIPE
    BUILDER_CONFIGS = configs(RECIPE)
