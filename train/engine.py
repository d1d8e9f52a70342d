"""Accelerate's part of a run, and the optimizer."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)
from torch import nn

from eagle3_data.errors import ConfigError, TrainingError
from eagle3_data.train.config import TrainConfig
from eagle3_data.train.tracking import chosen_trackers

PATIENCE = timedelta(hours=1)
"""How long a rank waits in a collective: longer than a live build waits for its servers, or rank 0 counts a vocabulary.
NCCL's own ten minutes would end the run before the error that says why."""


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Precision and trackers from the config; devices, DDP or FSDP2 from `accelerate launch`."""
    precision = config.run.precision
    if precision == "auto":
        precision = "bf16" if torch.cuda.is_available() else "fp32"
    plugin = fsdp2_plugin(bf16=precision == "bf16")
    accelerator = Accelerator(
        mixed_precision="bf16" if precision == "bf16" else "no",
        log_with=list(chosen_trackers(config)) or None,
        project_dir=str(config.run.output),
        fsdp_plugin=plugin,
        # the embedding and the target's head are large buffers, equal on every rank from the start
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=PATIENCE),
        ],
    )
    if plugin is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # torch shards on CPUs, too; Accelerate would go on with DDP there and not say so
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as `AcceleratorState` does on GPUs
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def fsdp2_plugin(*, bf16: bool) -> FullyShardedDataParallelPlugin | None:
    """FSDP2 as this loop needs it, when `accelerate launch --use_fsdp` asks for it; None otherwise.

    The whole unroll is one unit: its parts are called many times a step and by other names than `forward`. Accelerate's
    own bf16 policy would round the row counts that go in, the float64 sums that come out, and the sums of gradients.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise ConfigError("FSDP 1 is not supported", next="accelerate launch --use_fsdp --fsdp_version 2")
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise ConfigError("fsdp_offload_params is not supported", next="leave it off: only the draft is sharded")
    from torch.distributed.fsdp import MixedPrecisionPolicy

    compute = torch.bfloat16 if bf16 else None
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="NO_WRAP",
        cpu_ram_efficient_loading=False,  # every rank has the same weights from the seed
        mixed_precision_policy=MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
    )


def shard_again(model: nn.Module) -> None:
    """Under FSDP2: put the shards back in the place of the whole parameters that a forward pass without a backward
    pass leaves there. Nothing otherwise."""
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW on the trainable parameters; weight decay on matrices alone."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.optim.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(parameter.is_cuda for parameter in trainable)
    return torch.optim.AdamW(groups, lr=config.optim.lr, betas=config.optim.betas, fused=fused)


def raise_together(failing: float, mine: Exception | None) -> None:
    """On every rank, when at least one could not read its data: the ranks have summed up how many are `failing`."""
    if mine is not None:
        raise mine
    if failing > 0:
        raise TrainingError(
            "another rank could not read its samples and has said why",
            next="repeat the same command to go on from the last checkpoint",
        )


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
