"""SpecForge's offline features: one torch file per sample, `data_{i}.ckpt`, gzipped or not.

input_ids [T], loss_mask [T], aux_hidden_state [1, T, L*W], hidden_state [1, T, W] (after the final norm). The files are
read with torch's restricted loader: tensors and plain containers, never a pickled object's code.
"""

from __future__ import annotations

import gzip
import io
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_data.builders.foreign.source import Form, States
from eagle3_data.errors import ConfigError, DumpCorrupt, DumpMismatch

KEYS = ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state")


class SpecForgeFiles:
    form: Form = "specforge"

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when there is no such file."""
        self.folder = folder
        found = [*folder.rglob("*.ckpt"), *folder.rglob("*.ckpt.gz")]
        self._files = sorted(found, key=lambda path: (path.parent, _number(path), path.name))
        if not self._files:
            raise ConfigError(f"{folder} has no *.ckpt and no *.ckpt.gz file")

    def __len__(self) -> int:
        return len(self._files)

    def name(self, i: int) -> str:
        return str(self._files[i].relative_to(self.folder))

    def ids_and_mask(self, i: int) -> tuple[Tensor, Tensor]:
        return _ids_and_mask(self._read(i))

    def states(self, i: int) -> States:
        data = self._read(i)
        return States(data["aux_hidden_state"], data["hidden_state"], *_ids_and_mask(data))

    def files(self) -> list[Path]:
        return self._files

    def _read(self, i: int) -> dict[str, Tensor]:
        data = load_tensors(self._files[i])
        missing = [key for key in KEYS if not isinstance(data.get(key), Tensor)]
        if missing:
            raise DumpMismatch(f"{self.name(i)}: tensor {missing[0]} is missing; it has {', '.join(map(str, data))}")
        states = {key: data[key].flatten(0, -2) for key in ("aux_hidden_state", "hidden_state") if data[key].ndim >= 2}
        tokens = data["input_ids"].numel()
        counts = {key: len(states.get(key, ())) for key in ("aux_hidden_state", "hidden_state")}
        counts["loss_mask"] = data["loss_mask"].numel()
        wrong = [key for key, count in counts.items() if count != tokens]
        if wrong:
            raise DumpMismatch(f"{self.name(i)}: {wrong[0]} has {counts[wrong[0]]} rows, input_ids {tokens}")
        return {**data, **states}


def _ids_and_mask(data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return data["input_ids"].flatten().to(torch.int32), (data["loss_mask"].flatten() != 0).to(torch.uint8)


def _number(path: Path) -> int:
    """`data_12.ckpt` after `data_2.ckpt`."""
    digits = re.findall(r"\d+", path.name)
    return int(digits[-1]) if digits else -1


def load_tensors(path: Path) -> dict[str, Any]:
    """The dictionary of a torch file; nothing in it is executed. Raises DumpCorrupt when it is no such file."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                data = torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
        else:
            data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch's reader has no family of errors of its own
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DumpCorrupt(f"{path.name} is not a whole torch file of tensors alone: {first[:200]}") from error
    if not isinstance(data, dict):
        raise DumpCorrupt(f"{path.name} holds a {type(data).__name__}, not named tensors")
    return data
