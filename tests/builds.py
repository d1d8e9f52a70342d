"""Small real builds for tests: dumps written in the server's format, shards written by the real writer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import xxhash

from eagle3_data.capture import CaptureSpec
from eagle3_data.head import TargetHead
from eagle3_data.manifest import Manifest, PlanRow, ShardRow
from eagle3_data.protocol import DumpMeta, dump_tensors, ids_digest, safetensors_header
from eagle3_data.shards.index import consolidate
from eagle3_data.shards.layout import END_BYTES, SampleRecord, block_layout
from eagle3_data.shards.writer import OpenShard, Place, shard_name

SPEC = CaptureSpec(model="tiny", layers=(1, 3, 4), width=64, vocab_size=512)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class FakeDump:
    """A dump as the server writes it, with random states."""

    def __init__(self, spec: CaptureSpec, tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, spec.dtype)
        self.spec, self.tokens = spec, tokens
        self.aux = torch.randn(tokens, len(spec.layers) * spec.width, generator=generator).to(dtype)
        self.last = torch.randn(tokens, spec.width, generator=generator).to(dtype)
        self.ids = torch.randint(spec.vocab_size, (tokens,), generator=generator, dtype=torch.int32)
        self.mask = (torch.rand(tokens, generator=generator) > 0.5).to(torch.uint8)
        self.mask[-1] = 1

    def meta(self, rid: str = "e3d-r-0-0", instance: str = "test") -> DumpMeta:
        checksum = f"{xxhash.xxh3_128_hexdigest(raw(self.aux))}:{xxhash.xxh3_128_hexdigest(raw(self.last))}"
        return DumpMeta(
            rid=rid,
            tokens=self.tokens,
            ids_digest=ids_digest(self.ids.tolist()),
            layers=self.spec.layers,
            width=self.spec.width,
            dtype=self.spec.dtype,
            norm="post",
            next_token=7,
            finite=True,
            checksum=checksum,
            instance=instance,
        )

    def save(self, path: Path, meta: DumpMeta | None = None) -> Path:
        tensors = dump_tensors(
            tokens=self.tokens, num_aux=len(self.spec.layers), width=self.spec.width, dtype=self.spec.dtype
        )
        header = safetensors_header(tensors, (meta or self.meta()).to_strings())
        path.write_bytes(header + raw(self.aux) + raw(self.last) + raw(self.ids))
        return path

    def record(self, key: str) -> SampleRecord:
        meta = self.meta()
        checksum = meta.checksum if self.spec.last != "none" else meta.checksum.split(":")[0]
        return SampleRecord(
            key=key,
            id=f"id-{key}",
            tokens=self.tokens,
            supervised=int(self.mask.sum()),
            ids_digest=meta.ids_digest,
            next_token=meta.next_token,
            checksum=checksum,
        )


def places(spec: CaptureSpec, dumps: Sequence[FakeDump], first: int = 0) -> list[Place]:
    result, offset = [], 0
    for i, dump in enumerate(dumps):
        key = f"{first + i:08d}"
        result.append(Place(key, f"id-{key}", dump.tokens, offset))
        offset += block_layout(spec, dump.tokens).total
    return result


def put(shard: OpenShard, place: Place, dump: FakeDump, folder: Path) -> None:
    path = dump.save(folder / f"{place.key}.dump")
    fd = os.open(path, os.O_RDONLY)
    try:
        states_at = path.stat().st_size - len(raw(dump.aux)) - len(raw(dump.last)) - 4 * dump.tokens
        record = dump.record(place.key)
        placed = shard.write(record, fd, states_at, dump.ids.tolist(), raw(dump.mask))
    finally:
        os.close(fd)
    shard.settle(placed)


def make_build(
    folder: Path,
    lengths: Sequence[int] = (5, 64, 3, 100, 17, 8),
    per_shard: int | Sequence[int] = 2,
    spec: CaptureSpec = SPEC,
    head: TargetHead | None = None,
    dump: type[FakeDump] = FakeDump,
    dumps: Sequence[FakeDump] | None = None,
) -> list[FakeDump]:
    """A complete build with `len(lengths)` samples, or of `dumps`; returns what is in it, in order."""
    dumps = [dump(spec, n, seed) for seed, n in enumerate(lengths)] if dumps is None else list(dumps)
    scratch = folder.parent / f"{folder.name}.dumps"
    scratch.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[ShardRow] = []
    if isinstance(per_shard, int):
        per_shard = [per_shard] * -(-len(dumps) // per_shard)
    for number, (start, end) in enumerate(pairwise(accumulate(per_shard, initial=0))):
        part = dumps[start:end]
        spots = places(spec, part, start)
        shard = OpenShard(folder, shard_name("train", number), spots, spec, head)
        for place, one in zip(spots, part, strict=True):
            put(shard, place, one, scratch)
        row = shard.seal()
        assert row is not None
        rows.append(row)
        shard.forget()
    manifest = Manifest(
        dataset="test",
        run="r",
        state="complete",
        capture=spec.to_dict(),
        samples={},
        fingerprint={"samples": "x"},
        plan=PlanRow(
            samples=len(dumps),
            tokens=sum(dump.tokens for dump in dumps),
            nbytes=sum(row.nbytes for row in rows),
            shards=len(rows),
            shard_bytes=rows[0].nbytes + END_BYTES,
        ),
        shards=tuple(rows),
    )
    manifest.save(folder)
    consolidate(folder, manifest)
    return dumps
