"""Real weights (SmolLM2-135M-Instruct): states against transformers, logits against the server's top-1.

    python benchmarks/gpu/fidelity.py --out RESULT.json --prompts prompts.jsonl       about six minutes on one GPU
    python benchmarks/gpu/fidelity.py --out RESULT.json --prompts prompts.jsonl --device cpu --limit 4 --dtypes float32

Three servers in turn: bfloat16, bfloat16 with decode graphs, float32. The prompts are rendered questions, each followed
by its own greedy answer, so positions are those of real data. Top-1 is what the server itself says at every position
(`top_logprobs_num`); where ours differs, the gap of the two logits is reported, since bfloat16 ties are no error.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from capture import capture, leftovers, memory_folder, relative, row_errors
from host import DECODE_GRAPHS, NO_GRAPHS, Host, Results
from torch import Tensor

from eagle3_data.builders.smollm2 import make_checkpoint
from eagle3_data.protocol import AUX, LAST, default_aux_layers
from eagle3_data.server.client import Sampling, ServerClient
from eagle3_data.train.eval_prompts import read_prompts

Captured = list[dict[str, Tensor]]


async def with_answers(url: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    async with ServerClient(url) as client:
        sampling = Sampling(max_new_tokens=tokens)
        replies = await asyncio.gather(*(client.generate(prompt, sampling=sampling) for prompt in prompts))
    return [[*prompt, *reply.output_ids] for prompt, reply in zip(prompts, replies, strict=True)]


async def top_tokens(url: str, prompts: list[list[int]]) -> list[list[int]]:
    """The server's own top-1 token after each position but the last."""
    async with ServerClient(url) as client:
        replies = [await client.generate(prompt, top_logprobs=1) for prompt in prompts]
    return [[int(best[0][1]) for best in reply.meta["input_top_logprobs"][1:]] for reply in replies]


def top1(model: Any, captured: Captured, tops: list[list[int]], device: str) -> dict[str, Any]:
    """Share of positions where head(last) has the server's top-1, and the largest logit gap where it has not."""
    head = model.get_output_embeddings().weight
    equal = total = 0
    gap = 0.0
    for tensors, top in zip(captured, tops, strict=True):
        logits = (tensors[LAST][: len(top)].to(device, head.dtype) @ head.T).float()
        server = torch.tensor(top, device=device)
        best = logits.max(-1)
        differs = best.indices != server
        equal, total = equal + int((~differs).sum()), total + len(top)
        if differs.any():
            gap = max(gap, float((best.values - logits.gather(-1, server[:, None])[:, 0])[differs].max()))
    return {"positions": total, "top1_share": equal / total, "largest_gap": gap}


def against_transformers(model: Any, prompts: list[list[int]], captured: Captured, device: str) -> dict[str, float]:
    """Medians over all positions; beside them how far transformers in this dtype is from itself in float32."""
    layers = default_aux_layers(model.config.num_hidden_layers)
    errors: dict[str, list[Tensor]] = defaultdict(list)
    exact = copy.deepcopy(model).float()
    for prompt, tensors in zip(prompts, captured, strict=True):
        aux, last = hidden(model, prompt, layers, device)
        aux32, last32 = hidden(exact, prompt, layers, device)
        pairs = {"aux": (tensors[AUX], aux), "last": (tensors[LAST], last)}
        pairs |= {"aux_to_float32": (tensors[AUX], aux32), "last_to_float32": (tensors[LAST], last32)}
        pairs |= {"aux_transformers_to_float32": (aux, aux32), "last_transformers_to_float32": (last, last32)}
        for name, (found, right) in pairs.items():
            errors[name].append(row_errors(found, right))
    return {f"{name}_error": float(torch.cat(rows).median()) for name, rows in errors.items()}


def hidden(model: Any, prompt: list[int], layers: Sequence[int], device: str) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        states = model(torch.tensor([prompt], device=device), output_hidden_states=True).hidden_states
    return torch.cat([states[k + 1][0] for k in layers], -1), states[-1][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with prompt and source")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    host = Host(device=options.device, memory_share=0.4, log_folder=options.out.parent)
    settings = {"limit": options.limit, "answer_tokens": options.answer_tokens, "model": "SmolLM2-135M-Instruct"}
    results = Results(options.out, "fidelity", settings, "cpu" if host.cpu else "cuda")
    with memory_folder(options.memory) as memory:
        run(options, host, results, memory)


def run(options: argparse.Namespace, host: Host, results: Results, memory: Path) -> None:
    folder = make_checkpoint(memory / "models")
    every = read_prompts(options.prompts, str(folder), trust_remote_code=False, limit=None)
    chosen = [list(prompt.input_ids) for prompt in every[:: max(1, len(every) // options.limit)][: options.limit]]
    full: list[list[int]] = []
    device = "cpu" if host.cpu else "cuda"
    for dtype in options.dtypes.split(","):
        # Triton's attention multiplies float32 in tf32
        exact = ("--attention-backend", "torch_native") if dtype == "float32" else ()
        spool = memory / dtype
        with host.serving(host.config(folder, spool=spool, more=(*NO_GRAPHS, *exact), dtype=dtype), dtype) as server:
            full = full or asyncio.run(with_answers(server.url, chosen, options.answer_tokens))
            captured = [t for _, t in asyncio.run(capture(server.url, spool, full, "one"))]
            many = [t for _, t in asyncio.run(capture(server.url, spool, full, "many", in_flight=32))]
            tops, rest = asyncio.run(top_tokens(server.url, full)), leftovers(spool)
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
        results.add(
            dtype=dtype,
            prompts=len(full),
            **top1(model, captured, tops, device),
            **against_transformers(model, full, captured, device),
            batched_error=max(relative(a[LAST], b[LAST]) for a, b in zip(many, captured, strict=True)),
            left=rest,
        )
        del model
        gc.collect()
        if dtype == "bfloat16" and not host.cpu:
            graphs(host, folder, memory / "graphs", full, captured, results)


def graphs(host: Host, folder: Path, spool: Path, prompts: list[list[int]], right: Captured, results: Results) -> None:
    """The same prompts with decode graphs: equal to the last bit, since prefill runs the same kernels."""
    with host.serving(host.config(folder, spool=spool, more=DECODE_GRAPHS), "graphs") as server:
        found = [t for _, t in asyncio.run(capture(server.url, spool, prompts, "graphs"))]
    same = sum(a[AUX].equal(b[AUX]) and a[LAST].equal(b[LAST]) for a, b in zip(found, right, strict=True))
    error = max(relative(a[LAST], b[LAST]) for a, b in zip(found, right, strict=True))
    results.add(dtype="bfloat16", mode="decode graphs on", prompts=len(found), bit_equal=same, last_error=error)


if __name__ == "__main__":
    main()
