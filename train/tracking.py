"""TensorBoard and W&B, through Accelerate: which are there, and what they are told of a run besides its metrics."""

from __future__ import annotations

import importlib.util
from typing import Any

from accelerate import Accelerator

from eagle3_data.errors import ConfigError
from eagle3_data.train.config import Tracker, TrainConfig

PROJECT = "eagle3"


def chosen_trackers(config: TrainConfig) -> list[Tracker]:
    """Those of the configuration; without a choice TensorBoard where it is installed.

    Raises ConfigError for one that was asked for and is not installed.
    """
    wanted = config.run.trackers
    if wanted is None:
        return ["tensorboard"] if _installed("tensorboard") else []
    for name in wanted:
        if not _installed(name):
            raise ConfigError(
                f"run.trackers asks for {name}, which is not installed here",
                next=f"pip install 'eagle3-data[{name}]', or leave it out: metrics.jsonl is always written",
            )
    return list(wanted)


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def start_trackers(accelerator: Accelerator, config: TrainConfig) -> None:
    """Begin the trackers' run, with the whole configuration and the run folder's name; W&B's files go there, too."""
    output = config.run.output
    # W&B counts steps from 0 and drops smaller ones: a run that goes on is a run of its own, in one group
    wandb = {"name": output.name, "group": output.name, "dir": str(output)}
    try:
        accelerator.init_trackers(PROJECT, config=flat(config.model_dump(mode="json")), init_kwargs={"wandb": wandb})
    except Exception as error:
        if not type(error).__module__.startswith("wandb"):
            raise
        raise ConfigError(
            f"W&B does not start: {error}", next="wandb login, or WANDB_MODE=offline and wandb sync later"
        ) from error


def flat(config: dict[str, dict[str, Any]]) -> dict[str, str | int | float | bool]:
    """{'optim.lr': 1e-4, ...}: TensorBoard takes only single values, so lists and nulls are text."""
    return {
        f"{section}.{name}": value if isinstance(value, (str, int, float, bool)) else str(value)
        for section, fields in config.items()
        for name, value in fields.items()
    }
