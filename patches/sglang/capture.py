"""Capture of one scheduler process: from a finished forward to dumps in the spool."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3_data.patches.sglang.copier import Copier
from eagle3_data.patches.sglang.dumps import DumpForm
from eagle3_data.patches.sglang.facts import SchedulerFacts
from eagle3_data.patches.sglang.layers import read_layers
from eagle3_data.patches.sglang.refusals import Refused
from eagle3_data.patches.sglang.rows import Prompts, Segment
from eagle3_data.patches.sglang.states import BatchStates, CapturePath
from eagle3_data.patches.sglang.writers import Work, Writers
from eagle3_data.protocol import SpoolConfig, instance_marker

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Capture:
    """What one scheduler process captures, and with what. Made after the model is loaded."""

    facts: SchedulerFacts
    path: CapturePath
    spool: Path
    config: SpoolConfig
    form: DumpForm
    writes: bool
    """Attention-TP rank 0: the other ranks hold the same states and leave them alone."""
    prompts: Prompts
    copier: Copier | None
    writers: Writers | None

    @classmethod
    def start(cls, scheduler: Any, path: CapturePath, spool: Path, config: SpoolConfig, wanted: list[int]) -> Capture:
        """Read back what the loaded model captures, take host memory, start the writers. Raises Refused."""
        facts = SchedulerFacts.of(scheduler)
        if facts.speculative:
            raise Refused(["a draft is loaded; capture needs the target alone: leave out --speculative-algorithm"])
        if facts.radix_cache:
            raise Refused(["the radix cache is on; pass --disable-radix-cache"])
        layers = read_layers(scheduler.tp_worker.model_runner.model)
        if layers is None or list(layers) != wanted:
            raise Refused([f"the model captures outputs of {layers or 'no layers'}, and {wanted} were asked for"])
        form = DumpForm(layers=layers, width=facts.width, dtype=facts.dtype, instance=secrets.token_hex(8))
        writes = facts.attn_tp_rank == 0
        try:
            copier = Copier(facts.device, config.pinned_bytes) if writes else None
        except RuntimeError as error:
            raise Refused(
                [f'{config.pinned_bytes:,} bytes could not be pinned ({error}); lower "pinned_bytes" in eagle3.json']
            ) from error
        writers = None
        if copier is not None:
            try:
                writers = Writers(spool, config, form, copier.arena)
            except OSError as error:
                raise Refused([f"the process that writes dumps could not be started: {error}"]) from error
            instance_marker(spool, form.instance).touch()
        logger.info("eagle3-data: capturing outputs of layers %s to %s (%s)", list(layers), spool, path.name)
        return cls(facts, path, spool, config, form, writes, Prompts(), copier, writers)

    def on_batch(self, scheduler: Any, batch: Any, result: Any) -> None:
        """Start copies of our rows of a batch that has just been launched. Never blocks, never raises into SGLang."""
        if self.copier is None or self.writers is None or not batch.forward_mode.is_extend():
            return
        try:
            claims = self.prompts.claim(batch)
            work, done = Work(), None
            for prompt in claims.abandoned:
                work.abandon(prompt)
            for failure in claims.failures:
                work.fail(failure.prompt, failure.reason, failure.detail)
            if claims.segments:
                done = self._copy(scheduler, batch, result, claims.segments, self.copier, work)
            if work.changes:
                self.writers.put(work, done)
        except Exception:  # whatever it is, SGLang's scheduler must not end of it
            logger.exception("eagle3-data: a batch could not be captured")

    def _copy(
        self, scheduler: Any, batch: Any, result: Any, segments: Sequence[Segment], copier: Copier, work: Work
    ) -> Any:
        """What tells that the copies are done; see `Copier.copy`. A batch that cannot be copied fails its prompts."""
        try:
            states = self._states(result, sum(batch.extend_lens), len(batch.reqs))
            copied, done = copier.copy(states, segments, _stream(scheduler, self.facts.device))
        except Exception as error:
            logger.exception("eagle3-data: a batch could not be captured")
            for segment in segments:
                work.fail(segment.prompt, "internal", f"{type(error).__name__}: {error}")
            return None
        for segment, rows in zip(segments, copied, strict=True):
            if rows is None:
                free = copier.arena.free_bytes()
                detail = f"{segment.rows} rows found no room in {self.config.pinned_bytes:,} bytes ({free:,} free)"
                work.fail(segment.prompt, "pinned_full", detail)
            else:
                work.rows(segment.prompt, segment.start, rows)
        return done

    def _states(self, result: Any, rows: int, requests: int) -> BatchStates:
        """The batch's states, checked against the form that every dump of this server promises."""
        states = self.path.states(result)
        if states is None:
            raise LookupError("SGLang's result holds no states (was a prefill CUDA graph replayed?)")
        if states.logits is not None and len(states.logits) < requests:
            raise ValueError(f"logits of {len(states.logits)} requests, and {requests} are in the batch")
        aux = states.aux if isinstance(states.aux, Tensor) else states.aux[0]
        width = aux.shape[-1] if isinstance(states.aux, Tensor) else sum(t.shape[-1] for t in states.aux)
        expected = (len(self.form.layers) * self.form.width, self.form.width, self.form.dtype, self.form.dtype)
        found = (width, states.last.shape[-1], _name(aux), _name(states.last))
        if found != expected or min(len(aux), len(states.last)) < rows:
            raise ValueError(
                f"states are {found} (aux width, width, dtypes) with {len(aux)} and {len(states.last)} rows; "
                f"expected {expected} with {rows}"
            )
        return states


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _stream(scheduler: Any, device: str) -> Any:
    """The stream on which prefills run: SGLang's own under overlap scheduling, else the thread's current one."""
    if device == "cpu":
        return None
    if scheduler.enable_overlap:
        return scheduler.forward_stream
    return scheduler.device_module.current_stream()
