"""speculators' offline data: `hs_{i}.safetensors` beside an Arrow data set with the ids and masks.

hidden_states [T, L+1, W] (the last of them *before* the target's final norm), token_ids [T]. The loss mask is in the
data set that `Dataset.save_to_disk` wrote, row i belonging to file i. The final norm is applied here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3_data.builders.foreign.source import Form, Norm, States
from eagle3_data.errors import ConfigError, DumpCorrupt, DumpMismatch

PATTERN = re.compile(r"hs_(\d+)\.safetensors")


class SpeculatorsFiles:
    form: Form = "speculators"

    def __init__(self, folder: Path, norm: Norm) -> None:
        """`folder`: the data set with its `hidden_states/`. Raises ConfigError when one of the two is missing."""
        self.folder, self._norm = folder, norm
        states = folder / "hidden_states" if (folder / "hidden_states").is_dir() else folder
        numbers = sorted(int(found[1]) for path in states.iterdir() if (found := PATTERN.fullmatch(path.name)))
        self._files = {i: states / f"hs_{i}.safetensors" for i in numbers}
        self._numbers = numbers
        self._rows = _open_rows(folder)
        if not numbers:
            raise ConfigError(f"{states} has no hs_*.safetensors file")
        if numbers[-1] >= len(self._rows):
            raise ConfigError(f"{states} has hs_{numbers[-1]}.safetensors, the data set only {len(self._rows)} rows")

    def __len__(self) -> int:
        return len(self._numbers)

    def name(self, i: int) -> str:
        return str(self._files[self._numbers[i]].relative_to(self.folder))

    def ids_and_mask(self, i: int) -> tuple[Tensor, Tensor]:
        row = self._rows[self._numbers[i]]
        ids = torch.as_tensor(row["input_ids"]).flatten().to(torch.int32)
        mask = (torch.as_tensor(row["loss_mask"]).flatten() != 0).to(torch.uint8)
        if len(mask) != len(ids):
            raise DumpMismatch(f"row {self._numbers[i]}: {len(ids)} input_ids and {len(mask)} of loss_mask")
        return ids, mask

    def states(self, i: int) -> States:
        path = self._files[self._numbers[i]]
        try:
            data = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DumpCorrupt(f"{path.name}: {error}") from error
        hidden, ids = data.get("hidden_states"), data.get("token_ids")
        if hidden is None or ids is None or hidden.ndim != 3:
            raise DumpMismatch(f"{path.name}: expected hidden_states [T, L+1, W] and token_ids [T], found {list(data)}")
        input_ids, loss_mask = self.ids_and_mask(i)
        if not torch.equal(ids.to(torch.int32), input_ids):
            raise DumpMismatch(f"{path.name}: its token_ids are not the data set's input_ids")
        if len(hidden) != len(ids):
            raise DumpMismatch(f"{path.name}: {len(hidden)} rows of states for {len(ids)} tokens")
        return States(hidden[:, :-1].flatten(1), self._norm(hidden[:, -1]), input_ids, loss_mask)

    def files(self) -> list[Path]:
        return [*self._files.values(), *(Path(file["filename"]) for file in self._rows.cache_files)]


def _open_rows(folder: Path) -> Any:
    from datasets import load_from_disk

    try:
        rows = load_from_disk(str(folder))
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(
            f"{folder} is not speculators' data set: {error}",
            next="name the folder with the Arrow files and hidden_states/: the loss masks are in the former",
        ) from error
    missing = [name for name in ("input_ids", "loss_mask") if name not in rows.column_names]
    if missing:
        raise ConfigError(f"{folder} has no column {missing[0]}; it has {', '.join(rows.column_names)}")
    return rows.with_format(None)
