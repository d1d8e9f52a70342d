"""The training loop: Accelerate for devices, DDP or FSDP2, precision and trackers; everything else is in plain sight.

Each optimizer step starts with one small reduction in which the ranks agree on the number of trained rows (the loss's
denominator), on the clock, on stopping and on logging. So no rank ever takes part in a collective that another left
out.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from eagle3_data import durable
from eagle3_data.errors import TrainingError
from eagle3_data.train.checkpoint import TrainState, whole
from eagle3_data.train.config import TrainConfig, to_yaml
from eagle3_data.train.engine import StopSignal, make_accelerator, make_optimizer, raise_together
from eagle3_data.train.heldout import Heldout, HeldoutReport
from eagle3_data.train.loader import (
    BufferPool,
    Collator,
    HostBatch,
    LoadedStep,
    Prefetcher,
    Samples,
    empty_batch,
    to_device,
)
from eagle3_data.train.plan import Step
from eagle3_data.train.progress import Meter, MetricsLog, StepResult, evaluation_line
from eagle3_data.train.resume import Keeper
from eagle3_data.train.schedule import progress, rate_factor
from eagle3_data.train.setup import make_parts
from eagle3_data.train.tracking import start_trackers
from eagle3_data.train.vocab import VocabMap

Stopped = Literal["finished", "time", "interrupted", "early_stop"]


@dataclass(frozen=True, slots=True)
class TrainReport:
    """How a run ended."""

    output: Path
    stopped: Stopped
    state: TrainState
    heldout: HeldoutReport | None
    checkpoint: Path


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What all ranks know before a step."""

    counts_S: Tensor
    """float64 [S]: trained rows of the whole optimizer step."""
    stop: bool
    log: bool
    elapsed_s: float


class Trainer:
    def __init__(self, config: TrainConfig, data: Samples) -> None:
        self.config, self.data = config, data
        if config.run.threads is not None:
            torch.set_num_threads(config.run.threads)
        self.accelerator = make_accelerator(config)
        self.device = self.accelerator.device
        self.dtype = torch.bfloat16 if self.accelerator.mixed_precision == "bf16" else torch.float32
        flex = config.run.attention == "flex" or (config.run.attention == "auto" and self.device.type == "cuda")
        parts = make_parts(
            config,
            data,
            device=self.device,
            dtype=self.dtype,
            attention="flex" if flex else "plain",
            main_first=self._main_first,
            say=self._say,
        )
        self.plan = parts.plan
        self.alignment = config.ttt.alignment or data.alignment
        whose = "ttt.alignment" if config.ttt.alignment else "the data's"
        self._say(f"rows trained: {self.alignment} ({whose})")
        self.model, prepared = self.accelerator.prepare(parts.model, make_optimizer(parts.model, config))
        self.optimizer: torch.optim.Optimizer = prepared.optimizer
        self.core = self.accelerator.unwrap_model(self.model)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.keeper = Keeper(
            config.run.output,
            self.accelerator,
            self.core,
            self.optimizer,
            parts.vocab,
            keep=config.run.keep_checkpoints,
        )
        self.empty = empty_batch(data.capture, steps=config.ttt.steps, length=config.batch.pad_multiple)
        holdout = self.plan.holdout()
        self.heldout = Heldout(data, holdout, config) if holdout else None
        restored = self.keeper.restore(self.plan.key, allowed=config.run.resume)
        self.state = restored or TrainState(plan_key=self.plan.key)
        if restored is not None:
            done = self.plan.share(restored.cursor, config.optim.epochs)
            where = f"step {restored.step:,}, epoch {restored.epoch}, {done:.1%} of the data"
            self._say(f"resumed at {where}, from {config.run.output}")
        steps = self.state.step + self.plan.steps_left(self.state.cursor, config.optim.epochs)
        self.total_steps = min(steps, config.optim.max_steps or steps)
        self.signal = StopSignal(self._say)
        self._skipped_in_a_row = 0
        self._log: MetricsLog | None = None

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            print(text, flush=True)

    def _main_first(self, make: Callable[[], VocabMap]) -> VocabMap:
        with self.accelerator.main_process_first():
            return make()

    def run(self) -> TrainReport:
        """Train to the end, a limit or a signal; always leaves a checkpoint of where it stopped."""
        config, state = self.config, self.state
        output, device = config.run.output, self.device
        state.world_sizes = [*state.world_sizes, self.accelerator.num_processes]
        if self.accelerator.is_main_process:
            output.mkdir(parents=True, exist_ok=True)
            durable.write_text(output / "config.yaml", to_yaml(config))
            self._log = MetricsLog(output / "metrics.jsonl")
        start_trackers(self.accelerator, config)
        slots = config.batch.prefetch_batches + 1
        pool = BufferPool(
            self.data.capture, positions=self.plan.largest_batch(), count=slots, pinned=device.type == "cuda"
        )
        evaluation = self.heldout.nbytes if self.heldout is not None else 0
        self._say(
            f"host memory per rank: {pool.nbytes:,} bytes in {slots} {'pinned ' if pool.pinned else ''}buffers to read "
            f"ahead, {evaluation:,} bytes during an evaluation"
        )
        collator = Collator(
            self.data,
            max_sample_tokens=config.data.max_sample_tokens,
            steps=config.ttt.steps,
            alignment=self.alignment,
            reader_threads=config.batch.reader_threads,
        )
        if device.type == "cuda":
            self._say("compiling for this GPU: the first step takes a minute or two; a later run finds torch's cache")
        self.data.expect(self._reading_order())
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        steps = self.plan.steps(state.cursor, rank=rank, world=world, epochs=config.optim.epochs)
        with (
            self.signal.installed(),
            Prefetcher(steps, collator, pool, depth=config.batch.prefetch_batches) as loaded_steps,
        ):
            stopped, report = self._loop(loaded_steps, pool)
        folder = self.keeper.save(state)
        if self._log is not None:
            self._log.close()
        self.accelerator.end_training()
        return TrainReport(output, stopped, state, report, folder)

    def _reading_order(self) -> list[int]:
        """Samples as this run will first need them: the rest of the epoch, the held-out ones, what was used before."""
        cursor = self.state.cursor
        epoch = self.plan.epoch(cursor.epoch) if cursor.epoch < self.config.optim.epochs else []
        batches = [*epoch[cursor.consumed :], *self.plan.holdout(), *epoch[: cursor.consumed]]
        return [sample for batch in batches for sample in batch.samples]

    def _loop(self, loaded_steps: Prefetcher, pool: BufferPool) -> tuple[Stopped, HeldoutReport | None]:
        config, state = self.config, self.state
        if self._early_stop():
            self._say("stopped early before; raise run.early_stop_evals to train on")
            return "early_stop", None
        limit_s = 60 * config.optim.max_minutes if config.optim.max_minutes is not None else math.inf
        meter = Meter(config, self.device)
        base_s, started = state.elapsed_s, time.monotonic()
        stopped: Stopped = "finished"
        report: HeldoutReport | None = None
        trouble: Exception | None = None
        for loaded, batches in loaded_steps:
            if state.step >= self.total_steps and config.optim.max_steps is not None:
                break
            agreed = self._agree(loaded, base_s + time.monotonic() - started, meter.due(), loaded_steps.error)
            state.elapsed_s = agreed.elapsed_s
            if agreed.stop or agreed.elapsed_s >= limit_s:
                stopped = "interrupted" if agreed.stop else "time"
                break
            meter.add(self._step(loaded, batches, pool, agreed))
            trouble = loaded_steps.error
            state.step += 1
            state.epoch, state.consumed = loaded.step.after.epoch, loaded.step.after.consumed
            report = None
            saving = state.step % config.run.checkpoint_every_steps == 0
            evaluating = state.step % config.run.eval_every_steps == 0
            if saving or evaluating:
                self._all_read(trouble)
            if agreed.log or saving or state.step == 1:
                self._report_interval(meter)  # when saving, so that the saved counters are up to this step
            training_ends = time.monotonic()
            if evaluating:
                report = self._evaluate()
                if self._early_stop():
                    stopped = "early_stop"
                    break
            if saving:
                self.keeper.save(state)
            meter.leave_out(time.monotonic() - training_ends)
        if stopped == "finished":
            self._all_read(trouble)
        if meter.steps:
            self._report_interval(meter)
        if report is None and stopped != "interrupted":
            report = self._evaluate()
        return stopped, report

    def _early_stop(self) -> bool:
        limit = self.config.run.early_stop_evals
        return limit is not None and self.state.evals_without_better >= limit

    def _all_read(self, mine: Exception | None) -> None:
        """A step whose batches one rank could not read is neither saved nor evaluated."""
        failing = torch.tensor([float(mine is not None)], device=self.device)
        raise_together(float(self.accelerator.reduce(failing, reduction="sum")[0]), mine)

    def _agree(self, loaded: LoadedStep, elapsed_s: float, log: bool, error: Exception | None) -> _Agreed:
        main = float(self.accelerator.is_main_process)
        mine = [float(self.signal.asked), main * float(log), main * elapsed_s, float(error is not None)]
        vector = torch.cat([loaded.counts_S.double(), torch.tensor(mine, dtype=torch.float64)])
        shared = self.accelerator.reduce(vector.to(self.device), reduction="sum").cpu()
        stop, logged, elapsed, failing = shared[-4:].tolist()
        raise_together(failing, error)
        return _Agreed(shared[:-4], stop > 0, logged > 0, elapsed)

    def _step(
        self, loaded: LoadedStep, batches: Iterator[HostBatch | None], pool: BufferPool, agreed: _Agreed
    ) -> StepResult:
        config = self.config
        # the middle of this step, so that neither the first nor the last one has rate zero
        done = progress(self._middle(loaded.step), self.state.step + 0.5, agreed.elapsed_s, config.optim)
        lr = config.optim.lr * rate_factor(done, config.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # gradients are averaged over ranks: with the global denominator they have to be summed, else averaged over the
        # micro-batches of all ranks, of which some may have one less
        ranks, last_number = float(self.accelerator.num_processes), len(loaded.step.batches) - 1
        scale = ranks if config.loss.denominator == "tokens" else ranks / max(loaded.step.micro_batches, 1)
        result = StepResult.empty(config.ttt.steps, self.device, lr)
        for number, host in enumerate(batches):
            result.tokens += host.tokens if host is not None else 0
            batch = to_device(host, self.empty, self.device, self.dtype, pool)
            with contextlib.nullcontext() if number == last_number else self.accelerator.no_sync(self.model):
                out = self.model(batch, agreed.counts_S.float())
                self.accelerator.backward(out.loss * scale)
            result.sums += out.sums
        norm = self.accelerator.clip_grad_norm_(self.parameters, config.optim.clip_norm)
        result.grad_norm = float(whole(norm))
        if math.isfinite(result.grad_norm):
            self.optimizer.step()
            self._skipped_in_a_row = 0
        else:
            self._skip(result.grad_norm)
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def _middle(self, step: Step) -> float:
        epochs = self.config.optim.epochs
        return (self.plan.share(self.state.cursor, epochs) + self.plan.share(step.after, epochs)) / 2

    def _skip(self, norm: float) -> None:
        """The norm is the same on every rank, so all of them skip together."""
        self.state.skipped_steps += 1
        self._skipped_in_a_row += 1
        self._say(f"step {self.state.step + 1:,}: gradient norm is {norm}, step skipped")
        if self._skipped_in_a_row > self.config.run.max_skipped_steps:
            raise TrainingError(
                f"{self._skipped_in_a_row} steps in a row had a non-finite gradient",
                next="lower optim.lr, or check the data with eagle3-data verify",
            )

    def _report_interval(self, meter: Meter) -> None:
        values = self.accelerator.reduce(meter.reducible(), reduction="sum").cpu()
        share = self.plan.share(self.state.cursor, self.config.optim.epochs)
        interval = meter.close(values, self.state, self.total_steps, share)
        self._say(interval.line())
        self._record(interval.to_dict())

    def _record(self, values: dict[str, float]) -> None:
        if self._log is not None:
            self._log.write(self.state.step, values)
        self.accelerator.log(values, step=self.state.step)

    def _evaluate(self) -> HeldoutReport | None:
        if self.heldout is None:
            return None
        state = self.state
        report = self.heldout.run(self.core, self.accelerator, self.dtype)
        better = report.acceptance_length > state.best_acceptance
        state.evals_without_better = 0 if better else state.evals_without_better + 1
        if better:
            state.best_acceptance, state.best_step = report.acceptance_length, state.step
            self.keeper.save_best(state)
        self._say(evaluation_line(state.step, report, self.config.run.simulate_draft_tokens, better=better))
        self._record(report.to_dict())
        return report
