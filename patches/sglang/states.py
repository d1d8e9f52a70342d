"""Where a batch's states are: two ways to get the same three tensors out of SGLang.

    native  0.5.23 and newer: `--enable-return-aux-hidden-states` puts aux and last states into every prefill's result.
    hooks   0.5.14 to 0.5.22: a hook on `LogitsProcessor.forward` attaches its own arguments to the result.

N rows of a batch (padded under data-parallel attention), R requests, L aux layers, W width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from eagle3_data.patches.sglang.refusals import hook_refusals, native_refusals

SRT = "sglang.srt."
RUNNER = SRT + "model_executor.model_runner.ModelRunner."


@dataclass(frozen=True, slots=True)
class Hook:
    """One hooked SGLang function; `kind` is `before` or `after` (SGLang's HookType values)."""

    target: str
    function: Callable[..., Any]
    kind: str


@dataclass(frozen=True, slots=True)
class BatchStates:
    """Device tensors of one prefill; views that the next forward may rewrite."""

    aux: Tensor | list[Tensor]
    """[N, L*W], or L tensors [N, W]"""
    last: Tensor
    """[N, W], after the final norm"""
    logits: Tensor | None
    """[R, V], of each request's last row; None when SGLang has dropped them already"""


class CapturePath(Protocol):
    """One way of getting states out of a prefill's result."""

    name: str

    def refusals(self, args: Mapping[str, Any]) -> list[str]:
        """Problems with the server's arguments that only this way has."""

    def hooks(self, on_model: Callable[[Any], None]) -> list[Hook]:
        """What to hook; `on_model(model_runner)` must run once the target model is loaded."""

    def states(self, result: Any) -> BatchStates | None:
        """Take the states out of a `GenerationBatchResult` as `run_batch` returned it; None when it has none."""


def _target_models_only(on_model: Callable[[Any], None]) -> Callable[..., None]:
    def after(_result: object, runner: Any, *_args: object, **_named: object) -> None:
        if not getattr(runner, "is_draft_worker", False):
            on_model(runner)

    return after


class NativePath:
    """SGLang's own aux capture."""

    name = "native"

    def refusals(self, args: Mapping[str, Any]) -> list[str]:
        return native_refusals(args)

    def hooks(self, on_model: Callable[[Any], None]) -> list[Hook]:
        copy_to_cpu = SRT + "managers.utils.GenerationBatchResult.copy_to_cpu"
        return [
            # SGLang sets its default layers at the start of this function, so ours come after it.
            Hook(RUNNER + "init_attention_backends", _target_models_only(on_model), "after"),
            Hook(copy_to_cpu, self._keep_device_states, "before"),
        ]

    @staticmethod
    def _keep_device_states(result: Any, *_args: object, **_named: object) -> None:
        """A request for hidden states makes SGLang replace them by an unfinished host copy: keep the originals."""
        output = result.logits_output
        if output is not None and getattr(output, "last_hidden_states", None) is not None:
            result.eagle3_states = BatchStates(
                output.hidden_states, output.last_hidden_states, output.next_token_logits
            )

    def states(self, result: Any) -> BatchStates | None:
        kept: BatchStates | None = getattr(result, "eagle3_states", None)
        if kept is not None:
            return kept
        output = getattr(result, "logits_output", None)
        if output is None or getattr(output, "last_hidden_states", None) is None or output.hidden_states is None:
            return None
        return BatchStates(output.hidden_states, output.last_hidden_states, output.next_token_logits)


class HookPath:
    """Hooks alone, for an SGLang that has no capture of its own."""

    name = "hooks"

    def refusals(self, args: Mapping[str, Any]) -> list[str]:
        return hook_refusals(args)

    def hooks(self, on_model: Callable[[Any], None]) -> list[Hook]:
        return [
            Hook(RUNNER + "load_model", _target_models_only(on_model), "after"),
            Hook(SRT + "layers.logits_processor.LogitsProcessor.forward", self._attach, "after"),
        ]

    @staticmethod
    def _attach(
        result: Any,
        _processor: object,
        _input_ids: object,
        hidden_states: Tensor,
        _lm_head: object,
        metadata: Any,
        aux_hidden_states: Tensor | list[Tensor] | None = None,
        *_args: object,
        **_named: object,
    ) -> None:
        if aux_hidden_states is None or not metadata.forward_mode.is_extend():
            return
        # Packed by the copier, on its own stream and only for our prompts.
        result.eagle3_states = (aux_hidden_states, hidden_states)

    def states(self, result: Any) -> BatchStates | None:
        output = getattr(result, "logits_output", None)
        kept: tuple[Tensor | list[Tensor], Tensor] | None = getattr(output, "eagle3_states", None)
        if output is None or kept is None:
            return None
        del output.eagle3_states  # SGLang keeps the result for another batch; a batch of states is device memory
        return BatchStates(kept[0], kept[1], output.next_token_logits)
