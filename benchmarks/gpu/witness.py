"""A second plugin, for tests alone: forward hooks on the decoder layers of the same server process.

`install(FOLDER)` lays a distribution with SGLang's plugin entry point into FOLDER; with FOLDER on PYTHONPATH and
EAGLE3_WITNESS=OUT, every prefill of at least EAGLE3_WITNESS_ROWS rows leaves `OUT/{n}.safetensors`: `layer.K`, the
residual stream after layer K (hidden state + residual as the layer returns them), and `norm`, the final norm's output.
Nothing here knows how SGLang captures, which is the point of comparing with it.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

FOLDER, ROWS, LAYERS = "EAGLE3_WITNESS", "EAGLE3_WITNESS_ROWS", "EAGLE3_WITNESS_LAYERS"


def install(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(__file__, folder / "eagle3_witness.py")
    info = folder / "eagle3_witness-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eagle3-witness\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\neagle3_witness = eagle3_witness:register\n")


def register() -> None:
    if FOLDER not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", watch, HookType.AFTER)


def watch(_result: object, runner: Any, *_args: object, **_named: object) -> None:
    model, seen, number = runner.model, {}, itertools.count()
    while not hasattr(model, "layers"):
        model = model.language_model if hasattr(model, "language_model") else model.model
    least = int(os.environ[ROWS])

    def layer_hook(k: int) -> Any:
        def hook(_module: object, _args: object, output: Any) -> None:
            hidden, residual = output[0], output[1]
            seen[f"layer.{k}"] = (hidden if residual is None else hidden + residual).detach().clone()

        return hook

    def norm_hook(_module: object, _args: object, output: Any) -> None:
        from safetensors.torch import save_file

        last = output[0] if isinstance(output, tuple) else output
        if len(last) >= least:
            tensors = {name: tensor.cpu().contiguous() for name, tensor in (*seen.items(), ("norm", last.detach()))}
            hidden = Path(os.environ[FOLDER]) / f".{next(number)}"
            save_file(tensors, hidden)
            hidden.rename(hidden.with_name(f"{hidden.name[1:]}.safetensors"))
        seen.clear()

    for k in (int(part) for part in os.environ[LAYERS].split(",")):
        model.layers[k].register_forward_hook(layer_hook(k))
    model.norm.register_forward_hook(norm_hook)
