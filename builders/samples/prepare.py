"""Inputs to a sample store: read, render on all cores in order, drop with reasons, write."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3_data.builders.samples.encode import make_encoder
from eagle3_data.builders.samples.files import Inputs
from eagle3_data.builders.samples.input import Form, RawRow, open_rows
from eagle3_data.builders.samples.mask import Masker
from eagle3_data.builders.samples.policy import DUPLICATE, Seen
from eagle3_data.builders.samples.rows import Chunk, Drop, RowRenderer
from eagle3_data.builders.samples.spec import SampleSpec
from eagle3_data.builders.samples.store import SampleReport, SampleWriter
from eagle3_data.builders.samples.template import ChatTemplate
from eagle3_data.errors import LedgerError, SampleError

CHUNK_ROWS = 256

INLINE_ROWS = 2048
"""Smaller inputs are rendered in this process: starting others takes longer than the work."""

HOPELESS_ROWS = 512
"""When this many rows gave no sample at all, the run stops instead of reading on."""

Progress = Callable[[int, int, int], None]
"""Called with rows, samples and tokens so far."""


def load_tokenizer(model: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer. Code that comes with it runs only when asked for. Raises ConfigError otherwise."""
    from transformers import AutoTokenizer

    from eagle3_data.errors import ConfigError

    try:
        return AutoTokenizer.from_pretrained(str(model), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        hint = (
            "its tokenizer brings its own code: allow it with --trust-remote-code"
            if "trust_remote_code" in str(error)
            else "give a model folder or a hub id"
        )
        raise ConfigError(f"no tokenizer for {model}: {' '.join(str(error).split())[:300]}", next=hint) from error


@dataclass(frozen=True, slots=True)
class RendererPlan:
    """What a process needs to build its renderer.

    The tokenizer itself, so that other processes need not import torch, which loading one does (0.4 GB each); its name
    where the tokenizer's own code has to be loaded first.
    """

    tokenizer: Any
    spec: SampleSpec
    form: Form
    trust_remote_code: bool

    def build(self) -> RowRenderer:
        tokenizer = self.tokenizer
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer, trust_remote_code=self.trust_remote_code)
        template = ChatTemplate(tokenizer, kwargs=self.spec.template_kwargs)
        return RowRenderer(Masker(template, self.spec), make_encoder(tokenizer), self.form)


def prepare_samples(
    inputs: Inputs,
    tokenizer_or_model: Any,
    spec: SampleSpec,
    out: str | Path,
    *,
    workers: int = 1,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> SampleReport:
    """Write the samples of `inputs` to `out` (an `.arrow` file) and say what became of every row.

    `tokenizer_or_model` is a tokenizer, or the target's folder or hub id. `workers` above 1 renders in that many
    processes; the result is the same. Raises InputError for input that cannot be read, SampleError when nothing is left
    to learn from, ConfigError for a tokenizer without a chat template. Nothing appears at `out` unless all went well.
    """
    started = time.monotonic()
    stream = open_rows(inputs)
    tokenizer = tokenizer_or_model
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    named = trust_remote_code and isinstance(tokenizer_or_model, str | Path)
    renderer = RendererPlan(tokenizer, spec, stream.form, trust_remote_code).build()
    plan = RendererPlan(str(tokenizer_or_model) if named else tokenizer, spec, stream.form, trust_remote_code)
    spec = replace(spec, template_digest=renderer.masker.template.digest, tokenizer_digest=renderer.encoder.digest)
    tally = _Tally(spec, progress)
    with SampleWriter(Path(out), spec) as writer:
        for chunk in _chunks(stream.rows, renderer, plan, workers):
            tally.take(chunk, writer)
        report = SampleReport(
            inputs=stream.names,
            form=stream.form.name,
            rows=tally.rows,
            samples=writer.samples,
            tokens=writer.tokens,
            supervised=writer.supervised,
            longest=writer.longest,
            dropped=dict(writer.dropped.most_common()),
            notes=dict(sorted(tally.notes.items())),
            seconds=round(time.monotonic() - started, 3),
        )
        tally.check(report)
        writer.close(report)
    return report


class _Tally:
    """Counts over all chunks; duplicates are found here, since only here all samples pass."""

    def __init__(self, spec: SampleSpec, progress: Progress | None) -> None:
        self._seen = Seen() if spec.dedupe == "keep-first" else None
        self._progress = progress
        self.rows = self.outcomes = 0
        self.notes: Counter[str] = Counter()
        self._first_drop: Drop | None = None

    def take(self, chunk: Chunk, writer: SampleWriter) -> None:
        kept = [self._seen is None or self._seen.add(digest) for digest in chunk.digests]
        for keep, key, row_id in zip(kept, chunk.keys, chunk.ids, strict=True):
            if not keep:
                chunk.drops.append(Drop(int(key.partition("_")[0]), row_id, DUPLICATE, key))
        self.rows += chunk.rows
        self.outcomes += len(chunk.keys) + sum(drop.reason != DUPLICATE for drop in chunk.drops)
        self.notes.update(chunk.notes)
        if self._first_drop is None and chunk.drops:
            self._first_drop = chunk.drops[0]
        writer.add(chunk, kept)
        if self._progress is not None:
            self._progress(self.rows, writer.samples, writer.tokens)
        if chunk.error is not None:
            raise chunk.error
        if writer.samples == 0 and self.rows >= HOPELESS_ROWS:
            raise self._hopeless()

    def check(self, report: SampleReport) -> None:
        if report.samples + sum(report.dropped.values()) != self.outcomes:
            raise LedgerError(f"samples {report.samples} + dropped {dict(report.dropped)} != {self.outcomes}")
        if report.samples == 0:
            raise self._hopeless()

    def _hopeless(self) -> SampleError:
        first = self._first_drop
        shown = f"; row {first.row} (id {first.id}): {first.reason}: {first.detail}" if first else ""
        return SampleError(
            f"none of {self.rows} rows gives a sample with anything to learn{shown}",
            next="look at it with: eagle3-data samples INPUT --model MODEL --show 1",
        )


def _chunks(rows: Iterator[RawRow], renderer: RowRenderer, plan: RendererPlan, workers: int) -> Iterator[Chunk]:
    """Chunks in the order of the rows: here while few, then in `workers` processes with a bounded queue."""
    batches = iter(lambda: list(itertools.islice(rows, CHUNK_ROWS)), [])
    if workers <= 1:
        yield from map(renderer.chunk, batches)
        return
    head = list(itertools.islice(batches, INLINE_ROWS // CHUNK_ROWS))
    if len(head) < INLINE_ROWS // CHUNK_ROWS:
        yield from map(renderer.chunk, head)
        return
    from eagle3_data.builders.samples.workers import WorkerPool

    with WorkerPool(plan, workers) as pool:
        waiting: deque[Any] = deque()
        for batch in itertools.chain(head, batches):
            waiting.append(pool.submit(batch))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
