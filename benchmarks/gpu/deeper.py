"""The served speed-up on a target whose decode step costs as much as a larger model's, with the same answers.

    python benchmarks/gpu/deeper.py --out RESULT.json --work FOLDER --prompts prompts.jsonl      after end_to_end.py

SmolLM2-135M decodes a token in 1.5 ms, most of it SGLang's own time, which a draft cannot save. Here the same weights
are followed by layers that add exactly nothing (zero output projections), so that answers, states and end_to_end.py's
draft stay right, and only the target's time grows.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from study import Study, study_parser

SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""What a layer adds to the residual stream comes out of these two products."""


def deepen(model: Path, layers: int) -> Path:
    """A checkpoint beside `model` with `layers` layers, of which those after its own add nothing."""
    target = model.with_name(f"{model.name}-{layers}")
    if target.exists():
        return target
    config = json.loads((model / "config.json").read_text())
    own = int(config["num_hidden_layers"])
    if layers <= own:
        return model
    hidden = target.with_name(f".{target.name}")
    shutil.copytree(model, hidden, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: t for path in model.glob("*.safetensors") for name, t in load_file(path).items()}
    last = f"model.layers.{own - 1}."
    for name in [name for name in tensors if name.startswith(last)]:
        rest = name.removeprefix(last)
        for i in range(own, layers):
            copy = torch.zeros_like(tensors[name]) if rest in SILENT else tensors[name].clone()
            tensors[f"model.layers.{i}.{rest}"] = copy
    save_file(tensors, hidden / "model.safetensors", metadata={"format": "pt"})
    (hidden / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}, indent=1))
    hidden.rename(target)
    return target


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--layers", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the evaluation")
    options = parser.parse_args()
    study = Study(options, "deeper")
    draft = study.work / "run.bf16" / "draft"
    study.model = deepen(study.model, options.layers)
    evaluate = lambda: study.evaluate(*study.chains(draft), in_flight=options.evaluate_at, repeats=options.repeats)  # noqa: E731
    study.stage(f"evaluate {options.layers} layers", evaluate)


if __name__ == "__main__":
    main()
