"""What serving engines call things: layer numbers, config fields, launch commands. The one place that knows them.

A draft stores its aux layers as outputs (`output_of_layer`). Engines number them differently:

    vLLM     the number of the layer whose *input* it is                         output + 1
    SGLang   most models add 1 to the given ids                                  output
             DeepSeek and Kimi add 1 only when the first id is 1     output if the first is 1, else output + 1
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Literal

from eagle3_data.errors import TrainingError
from eagle3_data.train.spec import DraftSpec

Engine = Literal["sglang", "vllm"]

ADDS_ONE_IF_FIRST_IS_ONE = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "MistralLarge3ForCausalLM",
    }
)
"""Target architectures whose SGLang class inherits DeepSeek-V2's `set_eagle3_layers_to_capture`, or repeats it."""


DRAFT_BACKEND, DRAFT_QUANTISATION = "--speculative-draft-attention-backend", "--speculative-draft-model-quantization"


def captured_by(engine: Engine, ids: Sequence[int], architecture: str) -> tuple[int, ...]:
    """Outputs of layers that `engine` captures for these configured ids."""
    if engine == "vllm":
        return tuple(i - 1 for i in ids)
    if architecture in ADDS_ONE_IF_FIRST_IS_ONE and (not ids or ids[0] != 1):
        return tuple(i - 1 for i in ids)
    return tuple(ids)


def engine_layers(engine: Engine, outputs: Sequence[int], architecture: str) -> list[int]:
    """Ids to configure so that `engine` captures these outputs. Raises TrainingError when no ids would."""
    for ids in (list(outputs), [layer + 1 for layer in outputs]):
        if captured_by(engine, ids, architecture) == tuple(outputs):
            return ids
    raise TrainingError(
        f"{engine} cannot be told to capture the outputs of layers {list(outputs)} of a {architecture}: "
        "it adds 1 to the ids exactly when the first one is 1",
        next="capture layers whose first is not 0",
    )


def launch_command(engine: Engine, *, target: str, draft: str, draft_tokens: int, spec: DraftSpec) -> str:
    """A shell command that serves `target` with the draft that `spec` describes."""
    if engine == "vllm":
        settings = f'{{"model": "{draft}", "method": "eagle3", "num_speculative_tokens": {draft_tokens}}}'
        return shlex.join(["vllm", "serve", target, "--speculative-config", settings])
    command = ["python", "-m", "sglang.launch_server", "--model-path", target]
    command += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft]
    command += ["--speculative-num-steps", str(draft_tokens), "--speculative-eagle-topk", "1"]
    command += ["--speculative-num-draft-tokens", str(draft_tokens + 1)]
    return shlex.join([*command, *draft_arguments(spec)])


def draft_arguments(spec: DraftSpec) -> list[str]:
    """What SGLang must be told about this draft that its config.json cannot say."""
    arguments: list[str] = []
    if spec.sliding_window_tokens is not None:
        arguments += ["--speculative-draft-window-size", str(spec.sliding_window_tokens)]
    if spec.latent_attention:
        # the target's MLA backend may not serve a draft with plain attention
        arguments += [DRAFT_BACKEND, "fa3"]
    if spec.target_quantised:
        # SGLang would take the target's --quantization for the draft, too
        arguments += [DRAFT_QUANTISATION, "unquant"]
    return arguments
