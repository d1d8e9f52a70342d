"""One rank of a gloo run on CPU, in a forked process: a new interpreter per rank would spend its time importing."""

from __future__ import annotations

import os
import signal
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3_data.capture import CaptureSpec
from eagle3_data.cli.train import open_samples
from eagle3_data.train.config import parse_config
from eagle3_data.train.loader import Samples
from eagle3_data.train.trainer import Trainer
from tests.builds import FakeDump, make_build
from tests.models import tiny_model

LENGTHS = [20, 40, 60, 33, 12, 64, 50, 28, 9, 45, 70, 17, 61] * 2
PER_SHARD = (9, 1, 4, 2, 6, 1, 3)
"""Samples of seven unequal shards."""
ALONE = 70
"""Samples of this length fill a micro-batch alone and have nothing to train: the rank that gets one must not hang."""


class Rejected(FakeDump):
    """As captured, but nothing of a sample of `ALONE` tokens is supervised."""

    def __init__(self, spec: CaptureSpec, tokens: int, seed: int) -> None:
        super().__init__(spec, tokens, seed)
        if tokens == ALONE:
            self.mask.zero_()


def seven_shards(folder: Path) -> Path:
    """Batches of unequal length: nothing is ever concatenated across ranks (C62)."""
    make_build(folder, LENGTHS, per_shard=PER_SHARD, dump=Rejected)
    return folder


@dataclass(frozen=True)
class Job:
    out: Path
    folder: Path
    """A build to train on."""
    epochs: int = 2
    stop_at: int = 0
    """Stop after this step, as a signal to one rank would; 0: never."""
    kill_at: int = 0
    """All ranks are killed when this step is made and not yet saved; 0: never."""
    precision: str = "fp32"
    eval_every: int = 500
    servers: tuple[str, ...] = ()


def values(job: Job) -> dict[str, Any]:
    return {
        "data": {"folder": "unused", "max_sample_tokens": 128, "holdout_share": 0.15},
        "target": {"model": str(tiny_model("llama"))},
        "draft": {"vocab_size": 256},
        "ttt": {"steps": 3},
        "batch": {"micro_batch_tokens": 128, "batches_per_step": 4, "prefetch_batches": 2},
        "optim": {"lr": 1e-3, "epochs": job.epochs},
        "run": {"output": str(job.out), "log_every_s": 0, "trackers": [], "precision": job.precision}
        | {"checkpoint_every_steps": 1, "eval_every_steps": job.eval_every},
    }


def main(job: Job, notes: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    with open_samples(job.folder, job.servers) as data:
        return train(job, data, notes)


def train(job: Job, data: Samples, notes: Any) -> dict[str, Any]:
    trainer = Trainer(parse_config(values(job), source="test"), data)
    used: list[list[list[int]]] = []
    make = trainer._step

    def recorded(loaded: Any, *rest: Any) -> Any:
        used.append([micro.samples if micro is not None else [] for micro in loaded.step.batches])
        result = make(loaded, *rest)
        if trainer.state.step + 1 == job.kill_at:
            notes.put((trainer.accelerator.process_index, {"used": used[:-1], "step": job.kill_at - 1}))
            notes.close()
            notes.join_thread()
            try:
                trainer.accelerator.wait_for_everyone()
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        if trainer.state.step + 1 == job.stop_at:
            trainer.signal.asked = trainer.accelerator.process_index == 0  # one rank is told, all stop
        return result

    trainer._step = recorded  # type: ignore[method-assign]
    report = trainer.run()
    shards = [getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in trainer.parameters]
    return {
        "used": used,
        "stopped": report.stopped,
        "step": report.state.step,
        "held": sum(shard.numel() for shard in shards),
        "dtypes": {str(parameter.dtype) for parameter in trainer.parameters},
        "acceptance": report.state.best_acceptance,
    }


def rank_main(results: Any, environment: dict[str, str], job: Job) -> None:
    """Target of a forked process: forget the parent's Accelerate, become a rank, send what was used."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    os.environ.update(environment)
    try:
        results.put((int(environment["RANK"]), main(job, results)))
    except BaseException:
        results.put((int(environment["RANK"]), traceback.format_exc()))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    results.close()
    results.join_thread()
    os._exit(0)  # the parent's exit handlers are not ours to run
