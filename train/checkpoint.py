"""Checkpoints: a folder of safetensors and JSON, written under a hidden name and renamed when it is whole. No pickle.

checkpoints/step-00000500/
    draft.safetensors      float32 master weights, d2t, t2d, under the export's names
    optimizer.safetensors  AdamW moments and step counts, `{parameter}.{field}`
    rng.safetensors        torch generator states of rank 0
    spec.json              DraftSpec
    state.json             TrainState
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eagle3_data import durable
from eagle3_data.errors import TrainingError
from eagle3_data.protocol import parse_strict
from eagle3_data.train.plan import Cursor
from eagle3_data.train.spec import DraftSpec

DRAFT, OPTIMIZER, RNG, SPEC, STATE = (
    "draft.safetensors",
    "optimizer.safetensors",
    "rng.safetensors",
    "spec.json",
    "state.json",
)
PREFIX = "step-"


@dataclass(slots=True)
class TrainState:
    """Everything of a run besides tensors."""

    step: int = 0
    """Optimizer steps made, skipped ones included."""
    epoch: int = 0
    consumed: int = 0
    """Cursor: micro-batches of `epoch` used up."""
    elapsed_s: float = 0.0
    """Training time of all runs together."""
    tokens: int = 0
    """Real tokens trained on, all ranks."""
    skipped_steps: int = 0
    """Steps with a non-finite gradient, whose samples did not train."""
    first_loss: float | None = None
    last_loss: float | None = None
    best_acceptance: float = 0.0
    best_step: int = 0
    evals_without_better: int = 0
    plan_key: str = ""
    """`EpochPlan.key`: a resume on other data or batches is refused."""
    world_sizes: list[int] = field(default_factory=list)
    """Number of ranks of each run, in order."""

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.epoch, self.consumed)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainState:
        return cls(**parse_strict(cls, json.loads(text), "checkpoint state"))


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU; under FSDP2 this gathers the shards, so every rank must call it."""
    # by attribute: importing DTensor takes seconds, and without FSDP2 there is none
    gather = getattr(tensor, "full_tensor", None)
    full: Tensor = gather() if gather is not None else tensor
    return full.detach().to("cpu", copy=True).contiguous()


def draft_tensors(draft: nn.Module, vocab: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Master weights under their export names, and the vocabulary map (`d2t`, `t2d`)."""
    return {name: whole(p) for name, p in draft.named_parameters()} | dict(vocab)


def optimizer_tensors(draft: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in draft.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = whole(torch.as_tensor(value))
    return tensors


def load_optimizer(draft: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put saved moments back, sharded like their parameters under FSDP2."""
    names = {parameter: name for name, parameter in draft.named_parameters()}
    loaded = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(order):
        start = f"{names[parameter]}."
        entries = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
        entries = {key: value for key, value in entries.items() if "." not in key}
        if entries:
            state[number] = {key: _like(value, parameter) for key, value in entries.items()}
    loaded["state"] = state
    optimizer.load_state_dict(loaded)


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    if not value.ndim or not hasattr(parameter, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def load_draft(draft: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Copy saved weights into the draft. Raises TrainingError naming a tensor that is missing or of another shape."""
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            saved = tensors.get(name)
            if saved is None or saved.shape != parameter.shape:
                found = "nothing" if saved is None else f"shape {list(saved.shape)}"
                raise TrainingError(f"{source}: {name} should have shape {list(parameter.shape)}, found {found}")
            parameter.copy_(_like(saved.to(parameter.dtype), parameter))


def rng_tensors() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def write_checkpoint(
    folder: Path, spec: DraftSpec, state: TrainState | None, files: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Write `files` ({file name: tensors}), the spec and the state as `folder`, replacing an older one of that name."""
    hidden = durable.hidden(folder)
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    for name, tensors in files.items():
        save_file(dict(tensors), hidden / name)
    (hidden / SPEC).write_text(json.dumps(spec.to_dict(), indent=1) + "\n")
    if state is not None:
        (hidden / STATE).write_text(state.to_json())
    for path in hidden.iterdir():
        durable.fsync_file(path)
    durable.fsync_dir(hidden)
    old = durable.hidden(folder.with_name(folder.name + "-old"))
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(hidden, folder)
    durable.fsync_dir(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def checkpoint_folder(output: Path, step: int) -> Path:
    return output / "checkpoints" / f"{PREFIX}{step:08d}"


def checkpoints(output: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = (output / "checkpoints").glob(f"{PREFIX}*") if (output / "checkpoints").is_dir() else ()
    return sorted(path for path in found if (path / STATE).exists())


def prune(output: Path, keep: int) -> None:
    for folder in checkpoints(output)[:-keep]:
        shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class SavedDraft:
    """A draft as read from a checkpoint, best/ or a run folder."""

    folder: Path
    spec: DraftSpec
    tensors: dict[str, Tensor]


def find_draft(path: Path) -> Path:
    """The checkpoint meant by `path`: itself, a run's best/, or the run's newest checkpoint."""
    candidates = [path, path / "best", *reversed(checkpoints(path))]
    for folder in candidates:
        if (folder / DRAFT).exists() and (folder / SPEC).exists():
            return folder
    raise TrainingError(f"{path} is neither a checkpoint nor a run folder with one", next="train first")


def read_draft(path: Path) -> SavedDraft:
    folder = find_draft(path)
    try:
        spec = DraftSpec.from_dict(json.loads((folder / SPEC).read_text()))
        return SavedDraft(folder, spec, load_file(folder / DRAFT))
    except (ValueError, SafetensorError) as error:
        raise TrainingError(f"checkpoint {folder} cannot be read: {error}") from error
