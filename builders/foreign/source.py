"""What an import needs of somebody else's state files, whatever their form."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from eagle3_data.errors import ConfigError

Form = Literal["specforge", "speculators"]
Norm = Callable[[Tensor], Tensor]
"""The target's final norm: [T, W] -> [T, W], same dtype."""


@dataclass(frozen=True, slots=True)
class States:
    """One sample: T tokens, L aux layers, W width."""

    aux: Tensor
    """[T, L*W]"""
    last: Tensor
    """[T, W], after the final norm."""
    input_ids: Tensor
    """int32 [T], read together with the states."""
    loss_mask: Tensor
    """uint8 [T]"""


class Source(Protocol):
    """Samples by number. Reading raises DumpCorrupt for a file that is not whole, DumpMismatch for wrong contents."""

    form: Form
    folder: Path

    def __len__(self) -> int: ...
    def name(self, i: int) -> str:
        """File of sample i, relative to the source's folder."""

    def ids_and_mask(self, i: int) -> tuple[Tensor, Tensor]:
        """input_ids int32 [T], loss_mask uint8 [T]."""

    def states(self, i: int) -> States: ...
    def files(self) -> list[Path]:
        """Every file that samples are read from, in a fixed order."""


Stamp = list[int]
"""Size in bytes and time of the last change in nanoseconds."""


def stamps_of(source: Source) -> dict[str, Stamp]:
    """By file name, relative to the source's folder: equal stamps mean files that nobody wrote anew."""
    found = {}
    for path in source.files():
        stat = path.stat()
        found[os.path.relpath(path, source.folder)] = [stat.st_size, stat.st_mtime_ns]
    return found


def detect(folder: Path) -> Form:
    """Raises ConfigError when the folder holds neither form."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    if next(folder.rglob("hs_*.safetensors"), None) is not None:
        return "speculators"
    if next(folder.rglob("*.ckpt"), None) or next(folder.rglob("*.ckpt.gz"), None):
        return "specforge"
    raise ConfigError(
        f"{folder} holds neither state files of SpecForge (*.ckpt, *.ckpt.gz) nor of speculators (hs_*.safetensors), "
        "and no draft checkpoint (config.json)"
    )


def rms_norm(weight: Tensor, eps: float) -> Norm:
    """x / rms(x) * weight, in float32."""

    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (normed * weight.float()).to(x.dtype)

    return norm
