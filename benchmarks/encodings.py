"""What each encoding costs on real states: bytes per token, how far the target's distribution moves, decode speed.

    python benchmarks/encodings.py DATA --head MODEL [--write docs/format.md]

DATA is a plain build (`--encoding bf16 --last hidden`) of MODEL. Its states are taken as bf16. KL(p || q) is of the
target's next-token distribution p, from the states as captured, and q, from the decoded last state; for top-k, q is p
renormalised over its k tokens and the KL is taken the other way round, KL(q || p) = -log(mass of k), which is finite.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle3_data.capture import TOP_IDS, TOP_LOGPROBS, CaptureSpec
from eagle3_data.head import TargetHead
from eagle3_data.protocol import AUX, LAST
from eagle3_data.shards import ShardSet
from eagle3_data.shards.codec import decode, encode
from eagle3_data.shards.reader import view_of
from eagle3_data.shards.stored import stored_states

BEGIN, END = "<!-- made by benchmarks/encodings.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Way:
    name: str
    encoding: str
    last: str


WAYS = [
    Way("bf16", "bf16", "hidden"),
    Way("bf16-planes", "bf16-planes", "hidden"),
    Way("fp8", "fp8", "hidden"),
    Way("fp8, topk:64", "fp8", "topk:64"),
    Way("bf16, topk:64", "bf16", "topk:64"),
    Way("bf16, last none", "bf16", "none"),
]


@dataclass
class Cost:
    nbytes: int = 0
    tokens: int = 0
    kl: float = 0.0
    worst: float = 0.0
    decoded: int = 0
    seconds: float = 0.0


def measure(cost: Cost, spec: CaptureSpec, aux: Tensor, last: Tensor, head: TargetHead) -> None:
    """aux [T, L*W], last [T, W]: bf16."""
    tokens = len(aux)
    coded = encode(spec, tokens, view_of(aux.contiguous()), view_of(last.contiguous()), head)
    blob = bytearray(b"".join(bytes(part) for part in coded.parts))
    stored, at = {}, 0
    for name, dtype, shape in stored_states(spec, tokens, coded.packed):
        kind: torch.dtype = getattr(torch, dtype)
        count = int(torch.Size(shape).numel())
        stored[name] = torch.frombuffer(blob, dtype=kind, count=count, offset=at).view(shape)
        at += count * kind.itemsize
    cost.nbytes += at
    cost.tokens += tokens
    started = time.perf_counter()
    states = {name: decode(spec, name, stored) for name, _, _ in spec.tensors(tokens) if name in (AUX, LAST)}
    cost.seconds += time.perf_counter() - started
    cost.decoded += sum(tensor.nbytes for tensor in states.values())
    truth = head.logits(last).log_softmax(-1)  # [T, V]
    if spec.top_k:
        kept = truth.gather(-1, stored[TOP_IDS].long()).logsumexp(-1)
        kl = -kept
        assert torch.allclose(stored[TOP_LOGPROBS].float(), truth.gather(-1, stored[TOP_IDS].long()), atol=0.02)
    elif LAST in states:
        ours = head.logits(states[LAST]).log_softmax(-1)
        kl = (truth.exp() * (truth - ours)).sum(-1)
    else:
        kl = torch.zeros(tokens)
    cost.kl += float(kl.sum())
    cost.worst = max(cost.worst, float(kl.max()))


def table(costs: dict[str, Cost], model: str) -> str:
    plain = costs["bf16"]
    lines = [
        f"{Path(model).name}, {plain.tokens:,} tokens of its own answers; decode on {torch.get_num_threads()} threads.",
        "",
        "| states | bytes/token | of bf16 | mean KL (nats) | worst token's KL | decode GB/s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, cost in costs.items():
        speed = f"{cost.decoded / cost.seconds / 1e9:.2f}" if name.startswith(("fp8", "bf16-p")) else "-"
        kl, worst = f"{cost.kl / cost.tokens:.2e}", f"{cost.worst:.2e}"
        if name.endswith("none"):
            kl = worst = "no distribution"
        each = cost.nbytes / cost.tokens
        lines.append(f"| {name} | {each:,.0f} | {cost.nbytes / plain.nbytes:.3f} | {kl} | {worst} | {speed} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--head", required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    arguments = parser.parse_args()
    data = ShardSet.open(arguments.data)
    base = replace(data.capture, dtype="bfloat16")
    head = TargetHead.load(arguments.head, width=base.width)
    costs = {}
    for way in WAYS:
        spec = replace(
            base,
            aux_encoding=way.encoding,
            last_encoding=way.encoding if way.last == "hidden" else "bf16",
            last=way.last,
        )
        cost = costs[way.name] = Cost()
        for i in range(min(arguments.samples, len(data))):
            sample = data.read(i)
            measure(cost, spec, sample[AUX].bfloat16(), sample[LAST].bfloat16(), head)
        print(f"{way.name}: {cost.nbytes / cost.tokens:,.0f} bytes/token, KL {cost.kl / cost.tokens:.2e}", flush=True)
    text = table(costs, arguments.head)
    print(text)
    if arguments.write:
        page = arguments.write.read_text()
        block = f"{BEGIN}\n{text}\n{END}"
        arguments.write.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: block, page, flags=re.S))


if __name__ == "__main__":
    main()
