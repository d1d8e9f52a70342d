"""Accelerate's part of a run, and the optimizer."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from eagle3_data.train.config import TrainConfig


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Precision and trackers from the config; devices, DDP or FSDP2 from `accelerate launch`."""
    trackers = [name for name in config.run.trackers if importlib.util.find_spec(name) is not None]
    precision = config.run.precision
    if precision == "auto":
        precision = "bf16" if torch.cuda.is_available() else "fp32"
    return Accelerator(
        mixed_precision="bf16" if precision == "bf16" else "no",
        log_with=list(trackers) or None,
        project_dir=str(config.run.output),
        # the embedding and the target's head are large buffers, equal on every rank from the start
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW on the trainable parameters; weight decay on matrices alone."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.optim.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.optim.lr, betas=config.optim.betas)


class StopSignal:
    """SIGTERM and Ctrl-C as a flag that the loop looks at between steps; a second Ctrl-C ends at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked, self._say = False, say

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        self._say(f"{signal.Signals(signum).name}: stopping after this step, with a checkpoint")

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        try:
            old = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # signals can only be set in the main thread; a caller's thread goes without
            old = {}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
