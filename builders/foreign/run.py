"""Other projects' state files into a finished build: the same shards, ledger, checks and resume as an extraction.

Two passes. The first reads ids and masks into a sample store, so that the plan, and with it every sample's place, is
known. The second reads the states, proves them finite and of the declared shape, and places them.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from eagle3_data import durable
from eagle3_data.builders.dumps import Dump, Request
from eagle3_data.builders.foreign.source import Form, Source, Stamp, stamps_of
from eagle3_data.builders.ledger import Ledger
from eagle3_data.builders.matching.token_count import NO_TOKEN
from eagle3_data.builders.plan import Plan, PlannedShard, check_plan, written_bytes
from eagle3_data.builders.resume import as_texts
from eagle3_data.builders.samples.input import check_id
from eagle3_data.builders.samples.policy import NOTHING, sample_digest
from eagle3_data.builders.samples.rows import Chunk, Drop
from eagle3_data.builders.samples.spec import SampleSpec
from eagle3_data.builders.samples.store import STORE, Sample, SampleReport, SampleStore, SampleWriter
from eagle3_data.builders.sink import ShardSink
from eagle3_data.builders.stored import make_folder
from eagle3_data.capture import CaptureSpec
from eagle3_data.card import write_card
from eagle3_data.errors import BuildFailed, DumpMismatch, Eagle3Error, InputError, ManifestMismatch, NonFinite
from eagle3_data.failures import Failure
from eagle3_data.manifest import MANIFEST, Manifest
from eagle3_data.protocol import DTYPE_BYTES, RequestId
from eagle3_data.runlock import RunLock, work_folder
from eagle3_data.shards.index import consolidate
from eagle3_data.shards.reader import view_of

OnSample = Callable[[int, int], None]
"""Called with samples done and samples in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportConfig:
    out: Path
    model: str
    layers: tuple[int, ...]
    """Outputs that the files hold, ascending (EAGLE-3's defaults in both projects)."""
    width: int
    vocab_size: int
    context_length: int
    dataset: str = "custom"
    shard_bytes: int = 1 << 30
    max_failure_share: float = 0.01
    """The import stops once more samples than this share could not be read (one is always allowed)."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    form: Form
    saved: int
    failed: dict[str, int]
    skipped: dict[str, int]
    tokens: int
    nbytes: int


def import_states(
    config: ImportConfig, source: Source, *, on_text: Callable[[str], None], on_sample: OnSample
) -> ImportReport:
    """Write `config.out`. The same call goes on where an earlier one was stopped.

    Raises ConfigError for settings that do not fit the files, ManifestMismatch for files that were changed since the
    import began, BuildFailed when too many of them are bad.
    """
    make_folder(config.out)
    with RunLock(config.out):
        store = _store(config, source, on_text)
        return _Import(config, source, store).run(on_text, on_sample)


def _store(config: ImportConfig, source: Source, on_text: Callable[[str], None]) -> SampleStore:
    """Ids and masks of all files that can be read, in order; row number and file name go along."""
    folder = work_folder(config.out)
    path, note = folder / STORE, folder / "inputs.json"
    # what `_row` keeps depends on the vocabulary, too
    files = stamps_of(source)
    inputs = {"form": source.form, "vocab_size": config.vocab_size, "files": files}
    before = json.loads(note.read_text()) if note.exists() else {}
    if path.exists() and before == inputs:
        return SampleStore.open(path)
    if (config.out / MANIFEST).exists():
        _refuse_changed(config, before.get("files"), files)
    note.unlink(missing_ok=True)
    on_text(f"reading ids and masks of {len(source):,} files")
    with SampleWriter(path, SampleSpec()) as writer:
        for i in range(len(source)):
            writer.add(chunk := _row(config, source, i), [True] * len(chunk.keys))
        if not writer.samples:
            raise InputError(f"none of {len(source)} files can be used: {dict(writer.dropped)}")
        writer.close(
            SampleReport(
                inputs=(source.form,),
                form=source.form,
                rows=len(source),
                samples=writer.samples,
                tokens=writer.tokens,
                supervised=writer.supervised,
                longest=writer.longest,
                dropped=dict(writer.dropped),
            )
        )
    durable.write_text(note, json.dumps(inputs))
    return SampleStore.open(path)


def _refuse_changed(config: ImportConfig, before: dict[str, Stamp] | None, now: dict[str, Stamp]) -> None:
    """States that are stored may be those of the files before: they must not stand beside ids of other ones."""
    if not isinstance(before, dict):
        return
    odd = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if odd:
        what = "is gone" if odd[0] not in now else "is new" if odd[0] not in before else "was written anew"
        raise ManifestMismatch(
            f"{odd[0]} {what} since the import into {config.out} began ({len(odd)} of {len(now)} files differ)",
            next="import into another folder, or put the files back as they were (with their times)",
        )


def _row(config: ImportConfig, source: Source, i: int) -> Chunk:
    name = source.name(i)
    try:
        check_id(name, name)  # it is the sample's id
        ids, mask = source.ids_and_mask(i)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
            raise DumpMismatch(f"{name}: token id {int(ids.max())}, the target has {config.vocab_size}")
    except Eagle3Error as error:
        return Chunk(drops=[Drop(i, name, error.reason, error.message)])
    if not mask.any():
        return Chunk(drops=[Drop(i, name, NOTHING)])
    ids_T, mask_T = ids.numpy(), mask.numpy()
    return Chunk(
        rows=1,
        keys=[f"{i:08d}"],
        ids=[name],
        sources=[source.form],
        tokens=[len(ids_T)],
        supervised=[int(mask_T.sum())],
        digests=[sample_digest(ids_T, mask_T)],
        input_ids=ids_T,
        loss_mask=mask_T,
    )


class _Import:
    def __init__(self, config: ImportConfig, source: Source, store: SampleStore) -> None:
        self.config, self.source, self.store = config, source, store
        number = int(store.row(0).key)
        first, name = source.states(number).aux, source.name(number)
        dtype = str(first.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise DumpMismatch(f"{name}: states are {dtype}, expected one of {', '.join(DTYPE_BYTES)}")
        self.spec = CaptureSpec(
            model=config.model,
            layers=config.layers,
            width=config.width,
            dtype=dtype,
            vocab_size=config.vocab_size,
        )
        wanted = self.spec.width * len(self.spec.layers)
        if first.shape[-1] != wanted:
            raise DumpMismatch(
                f"{name}: aux states are {first.shape[-1]} wide, {len(self.spec.layers)} layers of width "
                f"{self.spec.width} make {wanted}",
                next="--target: the model they were captured from; --layers: the layers they hold",
            )

    def run(self, on_text: Callable[[str], None], on_sample: OnSample) -> ImportReport:
        config, store = self.config, self.store
        plan = Plan(store.tokens, self.spec, config.shard_bytes)
        manifest = self._manifest(plan)
        ledger = Ledger(config.out, manifest.plan.planned, manifest.plan.skipped)
        check_plan(
            plan,
            config.out,
            written=written_bytes(config.out, manifest),
            context_length=config.context_length,
            key_of=lambda row: store.row(row).key,
        )
        sink = ShardSink(config.out, [plan], store, manifest, ledger)
        on_text(f"{len(store):,} samples, {plan.total_tokens:,} tokens -> {len(plan)} shards of {config.out}")
        allowed = len(ledger.failures) + max(1, int(config.max_failure_share * len(store)))
        try:
            asyncio.run(self._fill(sink, plan, allowed, on_sample))
            ledger.check(complete=True)
            done = sink.manifest.model_copy(update={"state": "complete", "failed": ledger.failed})
            ledger.rewrite()
            sink.tidy()
            consolidate(config.out, done)
            write_card(config.out, done)
            done.save(config.out)
        finally:
            sink.close()
            ledger.close()
        return ImportReport(self.source.form, ledger.saved, ledger.failed, ledger.skipped, sink.tokens, sink.nbytes)

    async def _fill(self, sink: ShardSink, plan: Plan, allowed: int, on_sample: OnSample) -> None:
        for planned in plan:
            await self._shard(sink, planned, allowed, on_sample)

    async def _shard(self, sink: ShardSink, planned: PlannedShard, allowed: int, on_sample: OnSample) -> None:
        for row in sink.open_shard(planned):
            sample = self.store.row(row)
            request = Request(RequestId(sink.manifest.run, sample.key, 0), sample.input_ids.tolist())
            try:
                with self._dump(sample) as dump:
                    await sink.place(planned.name, sample, request, dump)
            except Eagle3Error as error:
                sink.give_up(
                    planned.name,
                    Failure.of(sample, error, 1, retry="mend the file, then import into another folder"),
                )
                if len(sink.ledger.failures) > allowed:
                    raise BuildFailed(
                        f"{len(sink.ledger.failures)} files failed, more than the {allowed} allowed; the last: "
                        f"{error.message}",
                        next="see failures.jsonl, or allow more with --max-failure-share",
                    ) from error
            on_sample(sink.ledger.saved + len(sink.ledger.failures), len(self.store))
        await sink.seal_if_settled(planned.name)

    def _dump(self, sample: Sample) -> Dump:
        """The sample's states as a nameless file in memory, in the order of the shards. Raises the family of errors."""
        i, tokens = int(sample.key), sample.tokens
        states, name = self.source.states(i), self.source.name(i)
        same_ids = np.array_equal(states.input_ids.numpy(), sample.input_ids)
        if not (same_ids and np.array_equal(states.loss_mask.numpy(), sample.loss_mask)):
            raise DumpMismatch(f"{name}: its {'loss mask is' if same_ids else 'ids are'} not what was read first")
        parts = []
        for what, tensor, width in (
            ("aux states", states.aux, self.spec.width * len(self.spec.layers)),
            ("last state", states.last, self.spec.width),
        ):
            if list(tensor.shape) != [tokens, width] or str(tensor.dtype) != f"torch.{self.spec.dtype}":
                raise DumpMismatch(
                    f"{name}: {what} is {tensor.dtype} {list(tensor.shape)}, expected {self.spec.dtype} "
                    f"{[tokens, width]}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise NonFinite(f"{name}: NaN or Inf in its {what}")
            parts.append(view_of(tensor.contiguous()))
        fd = os.memfd_create("eagle3-import")
        try:
            with open(fd, "wb", closefd=False) as file:
                for part in parts:
                    file.write(part)
            checksum = ":".join(xxhash.xxh3_128_hexdigest(part) for part in parts)
            return Dump(fd, 0, NO_TOKEN, checksum, "import")
        except BaseException:
            os.close(fd)
            raise

    def _manifest(self, plan: Plan) -> Manifest:
        config, store = self.config, self.store
        fields: dict[str, Any] = {
            "dataset": config.dataset,
            "form": self.source.form,
            "samples (ids and masks)": store.digest,
            "shard_bytes": config.shard_bytes,
            **{f"capture.{name}": value for name, value in self.spec.to_dict().items()},
        }
        fingerprint = as_texts(fields)
        if (config.out / MANIFEST).exists():
            manifest = Manifest.load(config.out)
            manifest.check_same(fingerprint)
            return manifest
        manifest = Manifest(
            dataset=config.dataset,
            run=secrets.token_hex(4),
            capture=self.spec.to_dict(),
            samples=store.spec.to_dict(),
            fingerprint=fingerprint,
            matching="imported",
            plan=plan.row(dict(store.report.dropped)),
        )
        manifest.save(config.out)
        return manifest
