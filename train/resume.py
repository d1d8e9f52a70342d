"""Saving a run's state and going on from it, at any number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor

from eagle3_data.errors import ConfigError
from eagle3_data.train import checkpoint as ckpt
from eagle3_data.train.engine import shard_again
from eagle3_data.train.spec import DraftSpec
from eagle3_data.train.ttt import TttModel
from eagle3_data.train.vocab import VocabMap


class Keeper:
    """Writes and restores the checkpoints of one run; every method is called by all ranks together."""

    def __init__(
        self,
        output: Path,
        accelerator: Accelerator,
        model: TttModel,
        optimizer: torch.optim.Optimizer,
        vocab: VocabMap,
        *,
        keep: int,
    ) -> None:
        self.output, self.accelerator, self.keep = output, accelerator, keep
        self.model, self.draft, self.optimizer = model, model.draft, optimizer
        self.spec: DraftSpec = model.draft.spec
        self._maps = {"d2t": vocab.d2t, "t2d": vocab.t2d} if self.spec.reduced_vocab else {}

    def save(self, state: ckpt.TrainState) -> Path:
        """A full checkpoint; older ones beyond `keep` are removed after it is whole."""
        folder = ckpt.checkpoint_folder(self.output, state.step)
        shard_again(self.model)
        optimizer = ckpt.optimizer_tensors(self.draft, self.optimizer)
        self._write(folder, state, {ckpt.OPTIMIZER: optimizer, ckpt.RNG: ckpt.rng_tensors()})
        if self.accelerator.is_main_process:
            ckpt.prune(self.output, self.keep)
        return folder

    def save_best(self, state: ckpt.TrainState) -> Path:
        """The weights alone, in best/."""
        folder = self.output / "best"
        self._write(folder, state, {})
        return folder

    def _write(self, folder: Path, state: ckpt.TrainState, more: dict[str, dict[str, Tensor]]) -> None:
        shard_again(self.model)
        tensors = ckpt.draft_tensors(self.draft, self._maps)
        if self.accelerator.is_main_process:
            ckpt.write_checkpoint(folder, self.spec, state, {ckpt.DRAFT: tensors, **more})
        self.accelerator.wait_for_everyone()

    def restore(self, plan_key: str, *, allowed: bool) -> ckpt.TrainState | None:
        """The newest checkpoint's state, with weights and moments put back; None when there is none.

        Raises ConfigError when it was made from other data, batches or another draft than the configuration's.
        """
        found = ckpt.checkpoints(self.output)
        if not found:
            return None
        if not allowed:
            raise ConfigError(
                f"{self.output} already holds checkpoints",
                next="set run.resume: true to go on from the newest, or use another run.output",
            )
        saved = ckpt.read_draft(found[-1])
        state = ckpt.TrainState.from_json((saved.folder / ckpt.STATE).read_text())
        if state.plan_key != plan_key:
            raise ConfigError(
                f"{saved.folder} was trained on other data, batches or seed than this configuration's",
                next="use another run.output, or set draft.init_from to start from its weights",
            )
        ours, theirs = self.spec.to_dict(), saved.spec.to_dict()
        wrong = next((name for name in ours if ours[name] != theirs[name]), None)
        if wrong is not None:
            raise ConfigError(
                f"{saved.folder}: the draft's {wrong} is {theirs[wrong]!r}, this configuration's is {ours[wrong]!r}",
                next="use another run.output",
            )
        ckpt.load_draft(self.draft, saved.tensors, saved.folder)
        ckpt.load_optimizer(self.draft, self.optimizer, load_file(saved.folder / ckpt.OPTIMIZER))
        ckpt.restore_rng(load_file(saved.folder / ckpt.RNG))
        return state
