"""What a run prints and logs: one line per interval, the same as a JSON line in metrics.jsonl, and the trackers."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3_data.train.checkpoint import TrainState
from eagle3_data.train.config import TrainConfig
from eagle3_data.train.heldout import HeldoutReport
from eagle3_data.train.losses import SUMS, StepMetrics, total_loss
from eagle3_data.train.schedule import progress


@dataclass(frozen=True, slots=True)
class Interval:
    """Training since the last line, all ranks together."""

    step: int
    total_steps: int
    epoch: int
    share: float
    """Of the run, 0..1."""
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    steps: list[StepMetrics]
    decay: float
    elapsed_s: float
    eta_s: float
    skipped_steps: int

    @property
    def loss(self) -> float:
        return total_loss(self.steps, self.decay)

    @property
    def chained_length(self) -> float:
        """1 + a_0 + a_0 a_1 + ...: acceptance length, bonus included, if the steps' accuracies were independent."""
        chained, product = 1.0, 1.0
        for step in self.steps:
            product *= step.accuracy
            chained += product
        return chained

    def line(self) -> str:
        return (
            f"step {self.step:,}/{self.total_steps:,} epoch {self.epoch} {self.share:6.1%}  loss {self.loss:.3f}  "
            f"acc {self.steps[0].accuracy:.3f}/{self.steps[-1].accuracy:.3f}  len~{self.chained_length:.2f}  "
            f"{self.tokens_per_s:,.0f} tok/s  lr {self.lr:.2e}  grad {self.grad_norm:.2f}  "
            f"{clock(self.elapsed_s)} done, {clock(self.eta_s)} left"
            + (f"  SKIPPED {self.skipped_steps} steps" if self.skipped_steps else "")
        )

    def to_dict(self) -> dict[str, float]:
        values: dict[str, float] = {
            "train/loss": self.loss,
            "train/chained_length": self.chained_length,
            "train/lr": self.lr,
            "train/grad_norm": self.grad_norm,
            "train/tokens": self.tokens,
            "train/tokens_per_s": self.tokens_per_s,
            "train/epoch": self.epoch,
            "train/skipped_steps": self.skipped_steps,
        }
        for i, step in enumerate(self.steps):
            values |= {f"train/{name}_{i}": value for name, value in step.to_dict().items()}
        return values


def clock(seconds: float) -> str:
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def evaluation_line(step: int, report: HeldoutReport, draft_tokens: int, *, better: bool) -> str:
    accuracies = " ".join(f"{metric.accuracy:.2f}" for metric in report.steps)
    return (
        f"held out at step {step:,}: loss {report.loss:.3f}  acceptance length {report.acceptance_length:.2f} "
        f"(simulated, {draft_tokens} draft tokens, bonus included)  accuracy by step {accuracies}"
        + ("  best so far" if better else "")
    )


@dataclass(slots=True)
class StepResult:
    """One optimizer step on this rank."""

    sums: Tensor
    """float64 [S, 6], see `losses.SUMS`."""
    lr: float
    tokens: int = 0
    """Without padding."""
    grad_norm: float = 0.0

    @classmethod
    def empty(cls, steps: int, device: torch.device, lr: float) -> StepResult:
        return cls(torch.zeros(steps, len(SUMS), dtype=torch.float64, device=device), lr)


class Meter:
    """Sums of this rank since the last progress line."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self._reset()

    def _reset(self) -> None:
        self.steps, self._tokens, self._since = 0, 0, time.monotonic()
        self._sums = torch.zeros(self.config.ttt.steps, len(SUMS), dtype=torch.float64, device=self.device)
        self._last = StepResult(self._sums, 0.0)

    def due(self) -> bool:
        return time.monotonic() - self._since >= self.config.run.log_every_s

    def add(self, result: StepResult) -> None:
        self.steps += 1
        self._tokens += result.tokens
        self._sums += result.sums
        self._last = result

    def reducible(self) -> Tensor:
        """float64 [6 S + 1]: to be summed over the ranks."""
        tokens = torch.tensor([float(self._tokens)], dtype=torch.float64, device=self.device)
        return torch.cat([self._sums.flatten(), tokens])

    def leave_out(self, seconds: float) -> None:
        """Time of this interval in which nothing was trained."""
        self._since += seconds

    def close(self, reduced: Tensor, state: TrainState, total_steps: int, data_share: float) -> Interval:
        """The interval's numbers from the reduced sums; updates the state's counters and starts a new interval."""
        seconds = max(time.monotonic() - self._since, 1e-9)
        share = progress(data_share, state.step, state.elapsed_s, self.config.optim)
        tokens = int(reduced[-1])
        state.tokens += tokens
        interval = Interval(
            step=state.step,
            total_steps=total_steps,
            epoch=state.epoch,
            share=share,
            lr=self._last.lr,
            grad_norm=self._last.grad_norm,
            tokens=state.tokens,
            tokens_per_s=tokens / seconds,
            steps=StepMetrics.from_sums(reduced[:-1].view(-1, len(SUMS))),
            decay=self.config.ttt.decay,
            elapsed_s=state.elapsed_s,
            eta_s=state.elapsed_s * (1 - share) / share if share > 0 else 0.0,
            skipped_steps=state.skipped_steps,
        )
        state.first_loss = interval.loss if state.first_loss is None else state.first_loss
        state.last_loss = interval.loss
        self._reset()
        return interval


class MetricsLog:
    """metrics.jsonl: {"t": ..., "step": 500, "train/loss": 2.31, ...}, flushed line by line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - held for the length of the run

    def write(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"t": round(time.time(), 3), "step": step, **values}) + "\n")

    def close(self) -> None:
        self._file.close()
