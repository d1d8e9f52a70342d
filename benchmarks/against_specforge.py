"""One optimizer step of ours and of SpecForge's EAGLE-3 training model, on the same draft, weights and batch.

    pip download --no-deps specforge && unzip -d specforge-site specforge-*.whl
    python benchmarks/against_specforge.py --specforge specforge-site [--device cuda --width 4096 ...]

Both compute EAGLE's loss (legacy rows, mean over batch x length, 7 steps, 0.8^i); the script fails unless they agree.
Each side runs in processes of its own, in turn; medians over the rounds are compared. On the CPU SpecForge's Triton
loss cannot run, so its own plain `_compute_loss` from the same file takes its place. Peak memory: on the CPU the
process' high-water mark less what it held before the first step, on a GPU the allocator's peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STEPS, DECAY = 7, 0.8


@dataclass(frozen=True)
class Case:
    """Weights and one batch of `samples` rows, equal on both sides."""

    args: argparse.Namespace
    device: torch.device
    kept: Tensor
    weights: dict[str, Tensor]
    embed: Tensor
    head: Tensor
    ids: Tensor
    aux: Tensor
    last: Tensor
    mask: Tensor

    @classmethod
    def make(cls, args: argparse.Namespace) -> Case:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 0.02) -> Tensor:
            return torch.randn(*shape, generator=generator) * scale

        width, heads, kv, dim, inner = args.width, args.heads, args.kv_heads, args.head_dim, 3 * args.width
        weights = {
            "fc.weight": normal(width, 3 * width),
            "norm.weight": torch.ones(width),
            "lm_head.weight": normal(args.draft_vocab, width),
            "midlayer.hidden_norm.weight": torch.ones(width),
            "midlayer.input_layernorm.weight": torch.ones(width),
            "midlayer.post_attention_layernorm.weight": torch.ones(width),
            "midlayer.self_attn.q_proj.weight": normal(heads * dim, 2 * width),
            "midlayer.self_attn.k_proj.weight": normal(kv * dim, 2 * width),
            "midlayer.self_attn.v_proj.weight": normal(kv * dim, 2 * width),
            "midlayer.self_attn.o_proj.weight": normal(width, heads * dim),
            "midlayer.mlp.gate_proj.weight": normal(inner, width),
            "midlayer.mlp.up_proj.weight": normal(inner, width),
            "midlayer.mlp.down_proj.weight": normal(width, inner),
        }
        shape = (args.samples, args.length)
        mask = torch.zeros(shape, dtype=torch.uint8)
        mask[:, int(args.length * (1 - args.answers)) : -1] = 1
        return cls(
            args,
            torch.device(args.device),
            torch.randperm(args.vocab, generator=generator)[: args.draft_vocab].sort().values,
            weights,
            normal(args.vocab, width),
            normal(args.vocab, width, scale=0.1),
            torch.randint(0, args.vocab, shape, generator=generator),
            normal(*shape, 3 * width, scale=1.0),
            normal(*shape, width, scale=1.0),
            mask,
        )

    @property
    def bf16(self) -> bool:
        return self.device.type == "cuda"

    def placed(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and self.bf16:
            tensor = tensor.bfloat16()
        return tensor.to(self.device)


def ours(case: Case) -> Callable[[], float]:
    from eagle3_data.train.alignment import row_masks
    from eagle3_data.train.config import LossConfig, TttConfig
    from eagle3_data.train.draft import Eagle3Draft
    from eagle3_data.train.rope import RopeSpec
    from eagle3_data.train.spec import DraftSpec
    from eagle3_data.train.target import TargetInfo
    from eagle3_data.train.teacher import Teacher
    from eagle3_data.train.ttt import Batch, TttModel

    args = case.args
    shape = {
        "hidden_size": args.width,
        "intermediate_size": 3 * args.width,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "vocab_size": args.vocab,
        "rms_norm_eps": 1e-6,
        "max_positions": 32768,
        "rope": RopeSpec(),
    }
    names = {"target_model": "t", "target_architecture": "LlamaForCausalLM", "target_layers": 32}
    spec = DraftSpec(**names, aux_layers=(1, 15, 28), draft_vocab_size=args.draft_vocab, **shape)  # type: ignore[arg-type]
    info = TargetInfo(
        model="t",
        architecture="",
        num_layers=32,
        tied_head=False,
        latent_attention=False,
        **shape,  # type: ignore[arg-type]
    )
    draft = Eagle3Draft(spec, case.placed(case.embed))
    draft.load_state_dict(case.weights, strict=False)
    config = LossConfig(denominator="batch", chunk_bytes=args.chunk_mib << 20)
    attention: Any = "flex" if case.bf16 else "plain"
    teacher = Teacher(case.placed(case.head), info, case.kept)
    model = TttModel(draft, teacher, TttConfig(steps=STEPS, decay=DECAY), config, attention).to(case.device)
    document = torch.zeros(case.ids.shape, dtype=torch.int32)
    positions = torch.arange(args.length, dtype=torch.int32).expand(case.ids.shape).contiguous()
    rows = row_masks(case.mask, document, steps=STEPS, alignment="legacy")
    batch = Batch(*(case.placed(t) for t in (case.ids, case.aux, case.last, document, positions, rows)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> float:
        with torch.autocast(case.device.type, dtype=torch.bfloat16, enabled=case.bf16):
            loss = model(batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def specforge(case: Case) -> Callable[[], float]:
    sys.path.append(case.args.specforge)
    import specforge.algorithms.eagle3.model as training
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.optimizer import BF16Optimizer
    from transformers import LlamaConfig

    args = case.args
    if not case.bf16:
        from specforge.core.loss import _compute_loss

        training.LogSoftmaxLoss = type("PlainLoss", (), {"apply": staticmethod(_compute_loss)})
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        num_hidden_layers=1,
        vocab_size=args.vocab,
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
        pad_token_id=0,
    )
    # in SpecForge norm_output is the norm before lm_head, not (as in SGLang) what the next step is fed
    config.draft_vocab_size, config.norm_output = args.draft_vocab, True
    backend = "flex_attention" if case.bf16 else "sdpa"
    draft = LlamaForCausalLMEagle3(config, attention_backend=backend)
    t2d = torch.zeros(args.vocab, dtype=torch.bool)
    t2d[case.kept] = True
    maps = {"t2d": t2d, "d2t": case.kept - torch.arange(args.draft_vocab)}
    draft.load_state_dict({**case.weights, **maps, "embed_tokens.weight": case.embed}, strict=False)
    draft.freeze_embedding()
    model = training.OnlineEagle3Model(draft, length=STEPS, attention_backend=backend).to(case.device)
    if case.bf16:
        model = model.bfloat16()
    head = case.placed(case.head)

    def left(x: Tensor) -> Tensor:
        return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)

    inputs = {
        "input_ids": case.placed(left(case.ids)),
        "attention_mask": torch.ones(case.ids.shape, dtype=torch.bool, device=case.device),
        "target": None,
        "loss_mask": case.mask[..., None].to(case.device),
        "hidden_states": case.placed(case.aux),
        "target_hidden_for_compact": case.placed(left(case.last)),
        "target_head_weight": head,
    }
    optimizer = BF16Optimizer(model, lr=1e-5, total_steps=1000, lr_scheduler="constant")

    def step() -> float:
        losses = model(**inputs)[0]
        loss = sum(DECAY**i * value for i, value in enumerate(losses))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def measure(case: Case, side: str) -> dict[str, float]:
    step = {"ours": ours, "specforge": specforge}[side](case)
    cuda = case.device.type == "cuda"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = step()
    for _ in range(case.args.warmup):
        step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(case.args.steps):
        began = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = (
        torch.cuda.max_memory_allocated()
        if cuda
        else 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    )
    return {"loss": loss, "tokens_per_s": case.ids.numel() / statistics.median(seconds), "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specforge", required=True, help="folder with the unpacked specforge wheel")
    parser.add_argument("--device", default="cpu")
    for name, default in (("width", 576), ("heads", 9), ("kv-heads", 3), ("head-dim", 64), ("vocab", 49152)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("draft-vocab", 8192), ("samples", 1), ("length", 512), ("chunk-mib", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("rounds", 3), ("steps", 3), ("warmup", 1), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--answers", type=float, default=0.6, help="share of the tokens that is supervised")
    parser.add_argument("--side", choices=("ours", "specforge"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.side:
        print(json.dumps(measure(Case.make(args), args.side)))
        return
    found: dict[str, list[dict[str, float]]] = {"ours": [], "specforge": []}
    for number in range(args.rounds):
        for side in sorted(found, reverse=bool(number % 2)):
            ran = subprocess.run([sys.executable, *sys.argv, "--side", side], capture_output=True, text=True)
            if ran.returncode:
                sys.exit(f"{side} failed:\n{ran.stderr[-3000:]}")
            found[side].append(json.loads(ran.stdout.splitlines()[-1]))
            print(f"round {number + 1} {side:10} {found[side][-1]}", flush=True)
    first = {side: rows[0]["loss"] for side, rows in found.items()}
    if abs(first["ours"] / first["specforge"] - 1) > (0.02 if args.device == "cuda" else 1e-4):
        sys.exit(f"the losses differ: {first}")
    for name, better in (("tokens_per_s", "higher"), ("peak_bytes", "lower")):
        mine, theirs = (statistics.median(row[name] for row in found[side]) for side in ("ours", "specforge"))
        print(f"{name}: ours {mine:,.0f}, SpecForge {theirs:,.0f}, ratio {mine / theirs:.2f} ({better} is better)")


if __name__ == "__main__":
    main()
