"""The same training on one GPU, with DDP on two and with FSDP2 on two: one loss curve, speed, memory, a resume across.

    python benchmarks/gpu/ranks.py --out RESULT.json                                  two GPUs, about two minutes
    python benchmarks/gpu/ranks.py --out RESULT.json --device cpu --shape tiny        to try it

Made-up states of a target whose next token follows from the last one, so that the loss falls. Each way is started by
`accelerate launch` as docs/training.md says and goes through the same samples: first in float32 at a small width, where
the curves have to be equal but for the order of sums, then in bf16 at `--shape`. `resume` goes on alone from FSDP2's
checkpoint of half the steps. Speed is the median of the steps of the second half.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture import memory_folder
from host import Results

from eagle3_data.server.process import free_port

ROOT = Path(__file__).resolve().parents[2]
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"width": 64, "vocab": 512, "draft_vocab": 256, "inner": 128, "heads": 4, "kv_heads": 2, "tokens": 256},
    "2k": {
        "width": 2048,
        "vocab": 32768,
        "draft_vocab": 16384,
        "inner": 5632,
        "heads": 16,
        "kv_heads": 8,
        "tokens": 4096,
    },
}
SAMPLES, BATCHES, SCALE = 48, 4, 0.02
WAYS = {"one": 1, "ddp2": 2, "fsdp2": 2, "resume": 1}


@dataclass(frozen=True)
class Options:
    shape: str
    steps: int
    cpu: bool
    folder: Path


# ------------------------------------------------------------------ data


def load_builds() -> Any:
    """The tests' maker of small builds, by its path: another `tests` may lie on the path of this host."""
    spec = importlib.util.spec_from_file_location("builds", ROOT / "tests" / "builds.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_data(folder: Path, shape: dict[str, int], lengths: list[int]) -> None:
    """A target of two tensors and a build of its states: x_{t+1} = follow[x_t] in nine of ten places."""
    import torch
    from safetensors.torch import save_file

    from eagle3_data.capture import CaptureSpec

    builds = load_builds()
    width, vocab = shape["width"], shape["vocab"]
    generator = torch.Generator().manual_seed(0)
    embed, head = (torch.randn(vocab, width, generator=generator) for _ in range(2))  # rows of unit variance
    used = torch.randperm(vocab, generator=generator)[: shape["draft_vocab"] // 2]
    follow = used[torch.randint(len(used), (vocab,), generator=generator)]
    target = folder / "target"
    target.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": width, "num_hidden_layers": 8}
    config |= {"num_attention_heads": shape["heads"], "num_key_value_heads": shape["kv_heads"]}
    config |= {"vocab_size": vocab, "intermediate_size": shape["inner"], "max_position_embeddings": 8192}
    (target / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": (embed * SCALE).bfloat16(), "lm_head.weight": (head * SCALE).bfloat16()}
    save_file(tensors, target / "model.safetensors")

    class Chain(builds.FakeDump):  # type: ignore[misc, name-defined]
        def __init__(self, spec: CaptureSpec, tokens: int, seed: int) -> None:
            own = torch.Generator().manual_seed(1000 + seed)
            ids = used[torch.randint(len(used), (tokens,), generator=own)]
            stay = torch.rand(tokens, generator=own) < 0.9
            for t in range(1, tokens):
                ids[t] = follow[ids[t - 1]] if stay[t] else ids[t]
            self.spec, self.tokens, self.ids = spec, tokens, ids.to(torch.int32)
            noise = torch.randn(tokens, 3 * width, generator=own)
            self.aux = (torch.cat([embed[ids], head[ids], head[follow[ids]]], -1) + 0.3 * noise).bfloat16()
            self.last = (head[follow[ids]] * 12 / (width * SCALE)).bfloat16()  # a logit of 12 there
            self.mask = torch.ones(tokens, dtype=torch.uint8)
            self.mask[: tokens // 4] = 0

    spec = CaptureSpec(model=str(target), layers=(1, 4, 6), width=width, vocab_size=vocab)
    builds.make_build(folder / "data", lengths, per_shard=8, spec=spec, dump=Chain)


def settings(options: Options, way: str, precision: str) -> dict[str, Any]:
    shape = SHAPES[options.shape]
    return {
        "data": {"folder": str(options.folder / "data"), "max_sample_tokens": shape["tokens"] // 4}
        | {"holdout_share": 0.1},
        "target": {"model": str(options.folder / "target")},
        "draft": {"vocab_size": shape["draft_vocab"], "fc_norm": True},
        "ttt": {"steps": 4 if options.shape == "tiny" else 7},
        "batch": {"micro_batch_tokens": shape["tokens"], "batches_per_step": BATCHES, "pad_multiple": 128},
        "optim": {"lr": 3e-4, "epochs": 1000, "max_steps": options.steps},
        "run": {
            "output": str(options.folder / "runs" / f"{way}-{precision}"),
            "precision": precision,
            "checkpoint_every_steps": options.steps // 2,
            "eval_every_steps": options.steps,
            "keep_checkpoints": 4,
            "log_every_s": 0.0,
            "trackers": [],
        },
    }


# ------------------------------------------------------------------ one rank


def rank(config: Path) -> None:
    """One process of `accelerate launch`: trains, and says what it held and in which dtypes."""
    import torch

    from eagle3_data.shards import ShardSet
    from eagle3_data.train.config import load_config
    from eagle3_data.train.trainer import Trainer

    loaded = load_config(config)
    trainer = Trainer(loaded, ShardSet.open(loaded.data.folder))
    accelerator, cuda = trainer.accelerator, torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    report = trainer.run()
    local = [getattr(p, "to_local", lambda p=p: p)() for p in trainer.parameters]
    moments = [value for entry in trainer.optimizer.state.values() for value in entry.values() if value.ndim]
    found = {
        "kind": str(accelerator.distributed_type).rsplit(".", 1)[-1],
        "world": accelerator.num_processes,
        "device": str(trainer.device),
        "attention": trainer.core.attention,
        "parameters": sum(p.numel() for p in trainer.parameters),
        "parameters_here": sum(p.numel() for p in local),
        "moments_here": sum(getattr(m, "to_local", lambda m=m: m)().numel() for m in moments),
        "weight_dtypes": sorted({str(p.dtype) for p in local}),
        "moment_dtypes": sorted({str(m.dtype) for m in moments}),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "acceptance_length": report.state.best_acceptance,
        "world_sizes": report.state.world_sizes,
    }
    (loaded.run.output / f"rank{accelerator.process_index}.json").write_text(json.dumps(found))


def launch(options: Options, way: str, precision: str, *, gpu: str) -> subprocess.Popen[bytes]:
    """The command of docs/training.md for this way."""
    values = settings(options, way, precision)
    output = Path(values["run"]["output"])
    output.mkdir(parents=True, exist_ok=True)
    config = output.with_suffix(".yaml")
    config.write_text(json.dumps(values))  # JSON is YAML
    how = ["--num_processes", str(WAYS[way]), "--num_machines", "1", "--mixed_precision", "no"]
    how += ["--dynamo_backend", "no", "--main_process_port", str(free_port())]
    if WAYS[way] > 1:
        how += ["--use_fsdp", "--fsdp_version", "2"] if way == "fsdp2" else ["--multi_gpu"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    if options.cpu:
        env |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "accelerate.commands.launch", *how, __file__, "--rank", str(config)]
    with open(output.with_suffix(".log"), "wb") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


# ------------------------------------------------------------------ all of it


def finish(options: Options, way: str, precision: str, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What a way has shown, out of its run folder; `failed` with the end of its log when it did not come to its end."""
    output = options.folder / "runs" / f"{way}-{precision}"
    try:
        code = process.wait(240)
    except subprocess.TimeoutExpired:
        process.kill()
        code = -9
    ranks = [json.loads(path.read_text()) for path in sorted(output.glob("rank*.json"))]
    if code != 0 or len(ranks) != WAYS[way]:
        return {"failed": output.with_suffix(".log").read_text(errors="replace")[-3000:], "code": code}
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    late = [line["train/tokens_per_s"] for line in steps if line["step"] > options.steps // 2]
    return {
        "losses": {line["step"]: line["train/loss"] for line in steps},
        "tokens": {line["step"]: line["train/tokens"] for line in steps},
        "tokens_per_s": statistics.median(late),
        "heldout_loss": next(line["eval/loss"] for line in reversed(lines) if "eval/loss" in line),
        "peak_bytes": [found["peak_bytes"] for found in ranks],
        "saved_dtypes": saved_dtypes(output),
        **{key: value for key, value in ranks[0].items() if key != "peak_bytes"},
        "parameters_here": [found["parameters_here"] for found in ranks],
    }


def saved_dtypes(output: Path) -> dict[str, list[str]]:
    """Of the newest checkpoint: dtypes of weights and of moments, less the vocabulary map and the step counts."""
    from safetensors.torch import load_file

    from eagle3_data.train.checkpoint import DRAFT, OPTIMIZER, checkpoints

    newest = checkpoints(output)[-1]
    kinds = {DRAFT: load_file(newest / DRAFT), OPTIMIZER: load_file(newest / OPTIMIZER)}
    return {
        name: sorted({str(t.dtype) for key, t in tensors.items() if key not in ("d2t", "t2d")})
        for name, tensors in kinds.items()
    }


def compare(found: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Largest relative difference of two curves in the steps that both have, and whether their samples agree."""
    ours, theirs = found["losses"], other["losses"]
    steps = sorted(set(ours) & set(theirs))
    return {
        "steps": len(steps),
        "max_difference": max(abs(ours[s] - theirs[s]) / theirs[s] for s in steps),
        "same_tokens": all(found["tokens"][s] == other["tokens"][s] for s in steps),
    }


def resume_from(options: Options, precision: str) -> None:
    """FSDP2's run folder as it was after half the steps, for one GPU to go on with."""
    source, output = (options.folder / "runs" / f"{way}-{precision}" for way in ("fsdp2", "resume"))
    name = f"step-{options.steps // 2:08d}"
    shutil.copytree(source / "checkpoints" / name, output / "checkpoints" / name)
    shutil.copytree(source / "vocab", output / "vocab")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="2k", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.rank)
        return
    if args.out is None:
        parser.error("--out is needed")
    with memory_folder(args.memory) as folder:
        run(args, folder)


def run(args: argparse.Namespace, folder: Path) -> None:
    cpu = args.device == "cpu"
    small = Options("tiny", min(args.steps, 12), cpu, folder / "small")
    real = Options(args.shape, args.steps, cpu, folder / "real")
    chosen = {"steps": args.steps, "shape": args.shape, "samples": SAMPLES, "batches_per_step": BATCHES}
    results = Results(args.out, "ranks", chosen | {"shapes": SHAPES}, args.device)
    began = time.monotonic()
    for options in (small, real):
        longest = SHAPES[options.shape]["tokens"] // 4
        make_data(options.folder, SHAPES[options.shape], [longest - longest // 16 * (i % 11) for i in range(SAMPLES)])
    print(f"data after {time.monotonic() - began:.0f} s", flush=True)
    kept: dict[tuple[str, str], dict[str, Any]] = {}

    def together(*jobs: tuple[Options, str, str, str]) -> None:
        """(options, way, precision, GPUs) of runs that go on at the same time."""
        running = [(job, launch(*job[:3], gpu=job[3])) for job in jobs]
        for (options, way, precision, _), process in running:
            found = kept[way, precision] = finish(options, way, precision, process)
            other = kept["one", precision]
            if way != "one" and "failed" not in found and "failed" not in other:
                found["against_one"] = compare(found, other)
            results.add(way=way, precision=precision, at_s=round(time.monotonic() - began), **found)

    # the small runs are compared, not timed, and leave the compiled kernels behind
    together(*((small, way, "fp32", "0" if way == "one" else "0,1") for way in ("one", "ddp2", "fsdp2")))
    for way in ("one", "ddp2", "fsdp2"):
        together((real, way, "bf16", "0" if way == "one" else "0,1"))
    jobs = [(small, "resume", "fp32", "1"), (real, "resume", "bf16", "0")]
    jobs = [job for job in jobs if "failed" not in kept["fsdp2", job[2]]]
    for options, _, precision, _ in jobs:
        resume_from(options, precision)
    together(*jobs)
    print(f"all after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
