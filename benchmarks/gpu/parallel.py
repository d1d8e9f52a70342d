"""One dump per prompt, full width, equal to one GPU's: tensor parallelism and data-parallel attention over two GPUs.

    python benchmarks/gpu/parallel.py --out RESULT.json                               two GPUs, about three minutes
    python benchmarks/gpu/parallel.py --out RESULT.json --device cpu --shape tiny --ways tp1,tp2

All servers load one checkpoint of random weights, written here first (see `shapes.make_weights` for why dummy weights
will not do). Data-parallel attention runs on the DeepSeek shape, which SGLang has it for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from capture import capture, leftovers, memory_folder, random_prompts, relative
from host import NO_GRAPHS, Host, Results
from shapes import make_model, make_weights, text_config
from torch import Tensor

from eagle3_data.errors import Eagle3Error
from eagle3_data.protocol import AUX, LAST
from eagle3_data.server.process import ServerProcess

LENGTHS = (33, 257, 900, 900, 1500, 64, 2100, 512)
NO_MULTICAST = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
"""NCCL alone: FlashInfer's all-reduce makes NVLink multicast objects, and where a host has none it waits for ever."""
SHARED_GPU = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
"""Nothing is timed here, so the servers share the GPUs, with each other and with whatever else runs."""
WAYS = {"tp1": (1, ()), "tp2": (2, ()), "dp2": (2, ("--enable-dp-attention", "--dp-size", "2"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", default="deepseek_small")
    parser.add_argument("--ways", default="tp1,tp2,dp2")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    host = Host(device=options.device, log_folder=options.out.parent)
    settings = {"shape": options.shape, "lengths": LENGTHS, "ways": options.ways}
    results = Results(options.out, "parallel", settings, "cpu" if host.cpu else "cuda")
    with memory_folder(options.memory) as folder:
        run(options, host, results, folder)


def run(options: argparse.Namespace, host: Host, results: Results, folder: Path) -> None:
    config = text_config(options.shape)
    dtype = "float32" if host.cpu else "bfloat16"
    model = make_model(options.shape, folder / "models", dtype=dtype)
    make_weights(model, device="cpu" if host.cpu else "cuda", dtype=dtype)
    prompts = random_prompts(LENGTHS, int(config["vocab_size"]), seed=3)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:

        def start(way: str) -> ServerProcess | Eagle3Error:
            tp, more = WAYS[way]
            flags = (*NO_GRAPHS, "--max-total-tokens", "16384", *NO_MULTICAST, *more)
            config = host.config(model, spool=folder / way, more=flags, tp=tp)
            try:
                return stack.enter_context(host.serving(config, way, env=SHARED_GPU))
            except Eagle3Error as error:
                return error

        ways = options.ways.split(",")
        servers = dict(zip(ways, pool.map(start, ways), strict=True))  # all at once: a start takes a minute or two
        found = {
            way: asyncio.run(capture(server.url, folder / way, prompts, way, in_flight=len(prompts)))
            for way, server in servers.items()
            if isinstance(server, ServerProcess)
        }
    states = {way: [tensors for _, tensors in replies] for way, replies in found.items()}
    for way, server in servers.items():
        if isinstance(server, ServerProcess):
            results.add(way=way, **compare(states[way], next(iter(states)), states, leftovers(folder / way)))
        else:
            results.add(way=way, refused=str(server)[-1500:])


def compare(
    found: list[dict[str, Tensor]], reference: str, states: dict[str, list[dict[str, Tensor]]], rest: list[str]
) -> dict[str, Any]:
    pairs = list(zip(found, states[reference], strict=True))
    return {
        "compared_with": reference,
        "dumps": len(found),
        "left": rest,
        "rows_right": all(len(t[AUX]) == len(t[LAST]) == n for t, n in zip(found, LENGTHS, strict=True)),
        "width": found[0][LAST].shape[-1],
        "aux_width": found[0][AUX].shape[-1],
        "aux_error": max(relative(a[AUX], b[AUX]) for a, b in pairs),
        "last_error": max(relative(a[LAST], b[LAST]) for a, b in pairs),
    }


if __name__ == "__main__":
    main()
