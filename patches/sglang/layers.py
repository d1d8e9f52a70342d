"""Aux layers: set on the loaded model, read back, reported as outputs, refused when they are not what was asked for.

SGLang's models hold `layers_to_capture`: a value v means the residual stream *before* layer v runs, so the output of
layer v-1. How ids become values differs: Llama adds 1 to every id; DeepSeek and Kimi add 1 only when the first id is 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from eagle3_data.patches.sglang.refusals import Refused

WRAPPERS = ("model", "language_model")
"""Attributes that lead from a model class to its decoder layers (Kimi-K2.5: language_model.model)."""


def _parts(model: Any, depth: int = 4) -> Iterator[Any]:
    """The model and what it wraps, outermost first."""
    yield model
    if depth:
        for name in WRAPPERS:
            inner = getattr(model, name, None)
            if inner is not None:
                yield from _parts(inner, depth - 1)


def read_layers(model: Any) -> tuple[int, ...] | None:
    """Outputs of layers that the model captures now, ascending; None when it names none."""
    for part in _parts(model):
        captured = getattr(part, "layers_to_capture", None)
        if captured:
            return tuple(sorted(int(value) - 1 for value in captured))
    return None


def set_layers(model: Any, wanted: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Make the model capture the outputs of `wanted` (ascending) and return what it says it captures.

    Raises Refused when the model cannot capture, or neither way of numbering gives exactly these layers.
    """
    name = type(model).__name__
    if wanted[-1] >= num_layers - 1:
        raise Refused(
            [
                f"layer {wanted[-1]} of {num_layers} was asked for: SGLang captures a layer's output as the next "
                f"layer's input, so {num_layers - 2} is the highest; the last state is captured anyway"
            ]
        )
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        raise Refused([f"SGLang's {name} cannot capture aux states (it has no set_eagle3_layers_to_capture)"])
    seen = []
    for ids in (list(wanted), [layer + 1 for layer in wanted]):
        model.set_eagle3_layers_to_capture(ids)
        found = read_layers(model)
        if found == tuple(wanted):
            return found
        seen.append(f"{ids} gave outputs of {list(found) if found else 'no layers'}")
    raise Refused(
        [
            f"{name} does not capture the outputs of layers {list(wanted)}: {'; '.join(seen)}; "
            "name other layers (--layers)"
        ]
    )
