"""SpecForge's published trainer on the same data, for the same steps: tokens/s, memory, acceptance length of both.

    python benchmarks/gpu/rival.py --out RESULT.json --work FOLDER --prompts prompts.jsonl       after end_to_end.py

The shards of end_to_end.py are written as SpecForge's offline features (`eagle3-data export --to specforge`) and
trained by `python -m specforge.cli train`, with our run's number of steps, learning rate, TTT steps and vocabulary map,
and as many samples a step as make our tokens a step. All else is SpecForge's default. Its tokens/s are those of its log
lines, by the clock of their arrival, over the second half of the run; its memory is the largest the driver showed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from host import group_memory_mib
from study import Served, Study, study_parser

from eagle3_data.protocol import IDS
from eagle3_data.shards import ShardSet
from eagle3_data.train.foreign_states import export_specforge

STEP = re.compile(r"^step (\d+): ")
LOG_EVERY = 10


class MemoryWatch(threading.Thread):
    """Largest GPU memory of a process and its children, MiB; polled from the driver."""

    def __init__(self, group: int) -> None:
        super().__init__(daemon=True)
        self.group, self.peak, self.over = group, 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(1.0):
            if (used := group_memory_mib(self.group)) is None:
                return
            self.peak = max(self.peak, used)


def features(study: Study) -> dict[str, Any]:
    data = ShardSet.open(study.work / "data.bf16")
    export_specforge(data, study.work / "specforge" / "features", on_sample=lambda _done, _total: None)
    return {"samples": len(data)}


def our_run(study: Study) -> dict[str, Any]:
    rows = json.loads((study.options.out.parent / study.options.ours).read_text())["rows"]
    return next(row for row in rows if row["stage"] == "train")


def prepare(study: Study, steps: int) -> tuple[Path, int, float]:
    """Config file, samples a step, and mean tokens of a sample (cut to what both train on)."""
    folder, options = study.work / "specforge", study.options
    data = ShardSet.open(study.work / "data.bf16")
    lengths = [min(len(data.read(i, (IDS,))[IDS]), 1024) for i in range(0, len(data), max(1, len(data) // 500))]
    mean = sum(lengths) / len(lengths)
    batch = max(1, round(options.batch_tokens / mean))
    draft = study.work / "run.bf16" / "draft"
    ours = json.loads((draft / "config.json").read_text())
    config = {key: value for key, value in ours.items() if key not in ("eagle_config", "fc_norm", "norm_output")}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "pad_token_id": ours.get("pad_token_id") or 0}
    (folder / "draft.json").write_text(json.dumps(config, indent=1))
    torch.save(vocabulary_map(draft, int(ours["vocab_size"])), folder / "vocabulary.pt")
    run = {
        "run_id": "rival",
        "output_dir": str(folder / "run"),
        "model": {
            "target_model_path": str(target_with_index(study.model, folder / "target")),
            "draft_model_config": str(folder / "draft.json"),
            "vocab_mapping_path": str(folder / "vocabulary.pt"),
            "lm_head_key": "model.embed_tokens.weight",
            "torch_dtype": "float32" if study.host.cpu else "bfloat16",
        },
        "data": {"hidden_states_path": str(folder / "features"), "max_length": 1024},
        "training": {
            "num_epochs": 100,
            "max_steps": steps,
            "batch_size": batch,
            "learning_rate": options.lr,
            "warmup_ratio": 0.05,
            "ttt_length": options.ttt_steps,
            "attention_backend": "sdpa" if study.host.cpu else "flex_attention",
            "log_interval": LOG_EVERY if steps >= 10 * LOG_EVERY else 1,
        },
    }
    path = folder / "run.json"
    path.write_text(json.dumps(run, indent=1))
    return path, batch, mean


def target_with_index(model: Path, folder: Path) -> Path:
    """The target as SpecForge's head loader wants it: it reads no single-file checkpoint without an index."""
    from safetensors import safe_open

    folder.mkdir(exist_ok=True)
    for path in model.iterdir():
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    with safe_open(model / "model.safetensors", "pt") as file:
        weight_map = dict.fromkeys(file.keys(), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def vocabulary_map(draft: Path, vocab: int) -> dict[str, torch.Tensor]:
    """Our draft's map in SpecForge's form: `d2t` offsets [draft vocabulary], `t2d` mask [vocabulary]."""
    from safetensors.torch import load_file

    offsets = load_file(draft / "model.safetensors")["d2t"].long()
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[torch.arange(len(offsets)) + offsets] = True
    return {"d2t": offsets, "t2d": mask}


def train(study: Study) -> dict[str, Any]:
    options, folder = study.options, study.work / "specforge"
    steps = int(our_run(study)["steps"])
    config, batch, mean = prepare(study, steps)
    command = [sys.executable, "-m", "specforge.cli", "train", "--config", str(config)]
    began = time.monotonic()
    seen: list[tuple[float, int]] = []
    with (folder / "train.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        watch = MemoryWatch(process.pid)
        watch.start()
        killer = threading.Timer(options.limit * 60, process.terminate)
        killer.start()
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            if found := STEP.match(line):
                seen.append((time.monotonic(), int(found[1])))
                if len(seen) % 10 == 1:
                    print(line.rstrip()[:200], flush=True)
        code = process.wait()
        killer.cancel()
        watch.over.set()
    result: dict[str, Any] = {"code": code, "train_seconds": time.monotonic() - began, "samples_per_step": batch}
    if code:
        study.results.add(stage="train failed", **result, message=(folder / "train.log").read_text()[-1500:])
        raise SystemExit("SpecForge's trainer failed")
    if len(seen) > 2:
        (t0, s0), (t1, s1) = seen[len(seen) // 2], seen[-1]
        result |= {"steps": s1, "tokens_per_s": (s1 - s0) * batch * mean / (t1 - t0)}
    return result | {"tokens_per_step": batch * mean, "peak_mib": watch.peak}


def evaluate(study: Study) -> dict[str, Any]:
    folder = study.work / "specforge"
    command = [sys.executable, "-m", "specforge.cli", "export", "--to", "sglang", "--checkpoint", str(folder / "run")]
    command += ["--draft-config", str(folder / "draft.json"), "--output-dir", str(folder / "draft")]
    ran = subprocess.run([*command, "--vocab-mapping", str(folder / "vocabulary.pt")], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"SpecForge's export failed:\n{ran.stderr[-2000:]}")
    return study.evaluate(Served("specforge", folder / "draft"), in_flight=study.options.evaluate_at[:1], repeats=1)


def main() -> None:
    parser: argparse.ArgumentParser = study_parser(__doc__)
    parser.add_argument("--ours", default="end_to_end.json", help="our run's results, beside --out")
    parser.add_argument("--limit", type=float, default=7.0, help="minutes after which SpecForge is stopped")
    study = Study(parser.parse_args(), "rival")
    (study.work / "specforge").mkdir(exist_ok=True)
    study.stage("features", lambda: features(study))
    study.stage("train", lambda: train(study))
    study.stage("evaluate", lambda: evaluate(study))


if __name__ == "__main__":
    main()
