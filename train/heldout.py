"""Evaluation on the held-out share: loss, accuracy per step, acceptance rate, calibration, simulated acceptance length.

Always on the 'strict' rows, whatever the training alignment, because those are the rows that serving meets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from eagle3_data.train.config import TrainConfig
from eagle3_data.train.engine import raise_together
from eagle3_data.train.loader import BufferPool, Collator, HostBatch, Samples, empty_batch, position_bytes, to_device
from eagle3_data.train.losses import BINS, SUMS, StepMetrics, calibration_error, total_loss
from eagle3_data.train.plan import MicroBatch, share
from eagle3_data.train.simulate import Walk, walk_answers
from eagle3_data.train.ttt import TttModel


@dataclass(frozen=True, slots=True)
class HeldoutReport:
    steps: list[StepMetrics]
    loss: float
    walk: Walk
    calibration_error: float

    @property
    def acceptance_length(self) -> float:
        return self.walk.acceptance_length

    def to_dict(self) -> dict[str, float]:
        values = {
            "eval/loss": self.loss,
            "eval/acceptance_length": self.acceptance_length,
            "eval/calibration_error": self.calibration_error,
        }
        for i, step in enumerate(self.steps):
            values |= {f"eval/accuracy_{i}": step.accuracy, f"eval/accept_{i}": step.accept}
        return values


class Heldout:
    """Holds its own small buffers; every rank takes every w-th micro-batch and all ranks end together."""

    def __init__(self, data: Samples, batches: list[MicroBatch], config: TrainConfig) -> None:
        self.data, self.batches, self.config = data, batches, config
        self.empty = empty_batch(data.capture, steps=config.ttt.steps, length=config.batch.pad_multiple)
        self.positions = max(batch.positions for batch in batches)
        self.nbytes = self.positions * position_bytes(data.capture)
        """Host memory of an evaluation."""

    def run(self, model: TttModel, accelerator: Accelerator, dtype: torch.dtype) -> HeldoutReport:
        config, device = self.config, accelerator.device
        steps = config.ttt.steps
        collator = Collator(
            self.data,
            max_sample_tokens=config.data.max_sample_tokens,
            steps=steps,
            alignment="strict",
            reader_threads=config.batch.reader_threads,
        )
        pool = BufferPool(self.data.capture, positions=self.positions, count=1, pinned=False)
        sums = torch.zeros(steps, len(SUMS), dtype=torch.float64, device=device)
        calibration = torch.zeros(BINS, 3, dtype=torch.float64, device=device)
        walk = Walk()
        error: Exception | None = None
        model.eval()
        mine = share(self.batches, rank=accelerator.process_index, world=accelerator.num_processes)
        with torch.no_grad(), accelerator.autocast():
            for micro in mine:
                host = None
                if micro is not None:
                    buffer = pool.take()
                    assert buffer is not None
                    try:
                        host = collator.collate(micro, buffer)
                    except Exception as found:  # the other ranks have to learn of it, below
                        error = found
                        pool.give(buffer)
                out = model(to_device(host, self.empty, device, dtype, pool))
                sums += out.sums
                calibration += out.calibration
                if host is not None:
                    walk += walk_batch(host, out.correct.cpu(), config.run.simulate_draft_tokens)
        model.train()
        collator.close()
        more = [walk.emitted, walk.verifications, walk.accepted, float(error is not None)]
        walked = torch.tensor(more, dtype=torch.float64, device=device)
        flat = accelerator.reduce(torch.cat([sums.flatten(), calibration.flatten(), walked]), reduction="sum")
        raise_together(float(flat[-1]), error)
        sums = flat[: sums.numel()].view_as(sums).cpu()
        calibration = flat[sums.numel() : -4].view_as(calibration).cpu()
        metrics = StepMetrics.from_sums(sums)
        return HeldoutReport(
            metrics,
            total_loss(metrics, config.ttt.decay),
            Walk(*(int(value) for value in flat[-4:-1].tolist())),
            calibration_error(calibration),
        )


def walk_batch(host: HostBatch, correct_SN: Tensor, draft_tokens: int) -> Walk:
    """The walks of all documents of a micro-batch. correct: bool [S, B*T] on the CPU."""
    document, total = host.batch.document, Walk()
    correct = correct_SN.view(correct_SN.shape[0], *document.shape)  # [S, B, T]
    for row, samples in enumerate(host.micro.rows):
        for number in range(len(samples)):
            inside = document[row] == number
            total += walk_answers(correct[:, row, inside], host.loss_mask[row, inside], draft_tokens)
    return total
