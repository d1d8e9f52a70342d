"""Functions of tensors that are compiled where their tensors are on a GPU.

A training step is some thousand small operations; started one by one from Python they keep a GPU waiting for the host.
On a CPU, where no launch has to be saved and a compiler may be missing, the functions run as they are written.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

VARYING = "BTNMRCUJ"
"""Letters of dimensions that differ from batch to batch or from step to step: their sizes stay symbolic."""
DEVICES = {"cuda"}
BACKEND = "inductor"


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, compiled when its first argument, a tensor, is on one of `DEVICES`.

    Dimensions are told by the letters after the last underscore of the parameters' names (`q_HRD`). All sizes but the
    `VARYING` ones are taken as constants: one compilation does for all batches, and the kernels know the widths.
    """
    letters = [name.rpartition("_")[2] for name in inspect.signature(function).parameters]
    varying = [[dim for dim, letter in enumerate(word) if letter in VARYING and word.isupper()] for word in letters]

    @functools.cache
    def compiled(backend: str) -> Callable[P, R]:
        return torch.compile(function, backend=backend)

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        first = args[0]
        if not isinstance(first, Tensor) or first.device.type not in DEVICES:
            return function(*args, **named)
        for arg, dims in zip(args, varying, strict=True):
            for dim in dims if isinstance(arg, Tensor) else ():
                torch._dynamo.maybe_mark_dynamic(arg, dim)
        return compiled(BACKEND)(*args, **named)

    return call
