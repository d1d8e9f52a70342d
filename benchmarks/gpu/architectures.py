"""Right layers on real widths: what is captured equals forward hooks in the same server process, for each architecture.

    python benchmarks/gpu/architectures.py --out RESULT.json [--shapes kimi_k25,qwen3_moe,gpt_oss,llama_8b]
    python benchmarks/gpu/architectures.py --out RESULT.json --device cpu --shapes tiny --tokens 96

Made-up weights at full width with few layers. One prompt at a time, so that one prompt is one forward. What SGLang or
the plugin refuses is written down with its message.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

from capture import capture, leftovers, memory_folder, random_prompts
from host import Host, Results, dummy
from safetensors.torch import load_file
from shapes import SHAPES, make_model, text_config
from witness import FOLDER, LAYERS, ROWS, install

from eagle3_data.errors import Eagle3Error
from eagle3_data.protocol import AUX, LAST, default_aux_layers


def compare(options: argparse.Namespace, host: Host, shape: str, folder: Path, memory: Path) -> dict[str, Any]:
    """Differences (max |a - b|) and bytes per token; raises what the server raises."""
    config = text_config(shape)
    layers = default_aux_layers(int(config["num_hidden_layers"]))
    model = make_model(shape, folder, dtype="float32" if host.cpu else "bfloat16")
    spool, seen = memory / "spool", folder / "seen"
    seen.mkdir()
    install(folder / "witness")
    env = {
        FOLDER: str(seen),
        ROWS: str(options.tokens),
        LAYERS: ",".join(map(str, layers)),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder / "witness"), os.environ.get("PYTHONPATH", "")])),
    }
    # longer than what SGLang's own warm-up sends
    prompts = random_prompts([options.tokens, options.tokens + 37], int(config["vocab_size"]), seed=1)
    flags = dummy("--disable-cuda-graph", "--max-total-tokens", "16384", "--trust-remote-code")
    with host.serving(host.config(model, spool=spool, more=flags), shape, env=env) as server:
        before = {path.name for path in seen.iterdir()}
        found = asyncio.run(capture(server.url, spool, prompts, "arch"))
        rest = leftovers(spool)
    files = sorted((p for p in seen.iterdir() if p.name not in before), key=lambda path: int(path.stem))
    worst = {f"layer.{k}": 0.0 for k in layers} | {"norm": 0.0}
    for (_, tensors), path in zip(found, files, strict=True):
        witness = load_file(path)
        parts = dict(zip((f"layer.{k}" for k in layers), tensors[AUX].chunk(len(layers), -1), strict=True))
        for name, mine in (*parts.items(), ("norm", tensors[LAST])):
            worst[name] = max(worst[name], float((mine.float() - witness[name].float()).abs().max()))
    row_bytes = sum(tensors[name][0].nbytes for name in (AUX, LAST))
    return {"layers": list(layers), "bytes_per_token": row_bytes, "max_difference": worst, "left": rest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shapes", default="kimi_k25,deepseek_v3,qwen3_moe,gpt_oss,llama_8b")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    host = Host(device=options.device, log_folder=options.out.parent)
    settings = {"tokens": options.tokens, "shapes": options.shapes}
    results = Results(options.out, "architectures", settings, "cpu" if host.cpu else "cuda")
    for shape in options.shapes.split(","):
        architecture = SHAPES[shape]["architectures"][0]
        with tempfile.TemporaryDirectory(prefix="eagle3-bench-") as folder, memory_folder(options.memory) as memory:
            try:
                results.add(
                    shape=shape, architecture=architecture, **compare(options, host, shape, Path(folder), memory)
                )
            except Eagle3Error as error:
                results.add(shape=shape, architecture=architecture, refused=str(error)[-1500:])


if __name__ == "__main__":
    main()
