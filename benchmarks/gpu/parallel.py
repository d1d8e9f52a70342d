"""One dump per prompt, full width, equal to one GPU's: tensor parallelism and data-parallel attention over two GPUs.

    python benchmarks/gpu/parallel.py --out RESULT.json                               two GPUs, about six minutes
    python benchmarks/gpu/parallel.py --out RESULT.json --device cpu --shape tiny --ways tp1

All servers load one checkpoint of random weights, written here first (see `shapes.make_weights` for why dummy weights
will not do). Data-parallel attention runs on the DeepSeek shape, which SGLang has it for.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from capture import capture, leftovers, memory_folder, random_prompts, relative
from host import NO_GRAPHS, Host, Results
from shapes import make_model, make_weights, text_config
from torch import Tensor

from eagle3_data.errors import Eagle3Error
from eagle3_data.protocol import AUX, LAST

LENGTHS = (33, 257, 900, 900, 1500, 64, 2100, 512)
NCCL_ALONE = ("--enforce-disable-flashinfer-allreduce-fusion", "--disable-custom-all-reduce")
"""SGLang's fused all-reduce makes NVLink multicast objects, which a rented host may forbid: it waits for ever there."""
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
    right: list[dict[str, Tensor]] | None = None
    reference = ""
    for way in options.ways.split(","):
        tp, more = WAYS[way]
        spool = folder / way
        flags = (*NO_GRAPHS, "--max-total-tokens", "16384", *NCCL_ALONE, *more)
        try:
            with host.serving(host.config(model, spool=spool, more=flags, tp=tp), way) as server:
                found = [t for _, t in asyncio.run(capture(server.url, spool, prompts, way, in_flight=len(prompts)))]
                rest = leftovers(spool)
        except Eagle3Error as error:
            results.add(way=way, refused=str(error)[-1500:])
            continue
        if right is None:
            right, reference = found, way
        pairs = list(zip(found, right, strict=True))
        results.add(
            way=way,
            compared_with=reference,
            dumps=len(found),
            left=rest,
            rows_right=all(len(t[AUX]) == len(t[LAST]) == n for t, n in zip(found, LENGTHS, strict=True)),
            width=found[0][LAST].shape[-1],
            aux_width=found[0][AUX].shape[-1],
            aux_error=max(relative(a[AUX], b[AUX]) for a, b in pairs),
            last_error=max(relative(a[LAST], b[LAST]) for a, b in pairs),
        )


if __name__ == "__main__":
    main()
