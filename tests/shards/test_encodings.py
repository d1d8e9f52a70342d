"""Encodings: lossless where they say so, within their bound where not, the same bytes in any order, kill-safe."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_data.capture import TOP_IDS, TOP_LOGPROBS, CaptureSpec
from eagle3_data.errors import ConfigError, DumpCorrupt, ShardCorrupt
from eagle3_data.head import TargetHead
from eagle3_data.manifest import Manifest
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from eagle3_data.shards import OpenShard, ShardSet
from eagle3_data.shards.cache import CacheConfig
from eagle3_data.shards.codec import decode
from eagle3_data.shards.fp8 import from_fp8, to_fp8
from eagle3_data.shards.layout import block_layout, block_sizes
from eagle3_data.shards.planes import join_planes, split_planes
from eagle3_data.shards.remote import RemoteShardSet
from eagle3_data.shards.stored import FRAME_VALUES, PAD, stored_states
from eagle3_data.shards.table import SampleTable
from eagle3_data.verify import verify
from tests.builds import SPEC, FakeDump, make_build, places, put
from tests.webserver import FolderServer

PLANES = replace(SPEC, aux_encoding="bf16-planes", last_encoding="bf16-planes")
FP8 = replace(SPEC, aux_encoding="fp8", last_encoding="fp8")
MIXED = replace(SPEC, aux_encoding="fp8", last_encoding="bf16-planes")
SPECS = {"planes": PLANES, "fp8": FP8, "mixed": MIXED}
LENGTHS = (5, 64, 3, 700, 17)


def planes_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sizes, low, frames = split_planes(values)
    return sizes, low, np.frombuffer(b"".join(bytes(frame) for frame in frames), np.uint8)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(0, 3000), st.sampled_from(["states", "noise", "one", "specials"]))
def test_planes_are_bit_exact(seed: int, count: int, kind: str) -> None:
    """Any bit pattern: NaN, Inf, -0 and denormals included."""
    generator = np.random.default_rng(seed)
    if kind == "states":
        values = torch.from_numpy(generator.standard_normal(count).astype(np.float32)).to(torch.bfloat16)
        bits = values.view(torch.int16).numpy().view(np.uint16)
    elif kind == "noise":
        bits = generator.integers(0, 1 << 16, count, dtype=np.uint16)
    elif kind == "one":
        bits = np.full(count, 0xBF80, np.uint16)
    else:
        bits = generator.choice(np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 1, 0x8001], np.uint16), count)
    out = np.zeros(count, np.uint16)
    join_planes(*planes_of(bits), out)
    assert (out == bits).all()


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_planes_over_many_frames(extra: int) -> None:
    bits = np.random.default_rng(1).integers(0x3E00, 0x4100, 5 * FRAME_VALUES + extra, dtype=np.uint16)
    sizes, low, high = planes_of(bits)
    assert len(sizes) == 5 + (extra > 0)
    out = np.zeros_like(bits)
    join_planes(sizes, low, high, out)
    assert (out == bits).all()
    assert len(high) < len(bits) // 2


def test_noise_never_takes_more_than_its_room() -> None:
    bits = np.random.default_rng(2).integers(0, 1 << 16, FRAME_VALUES + 77, dtype=np.uint16)
    sizes, _, _ = planes_of(bits)
    assert sizes.tolist() == [FRAME_VALUES, 77]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(0, 400), st.integers(1, 255))
def test_damaged_planes_are_refused_or_differ_but_never_overrun(seed: int, at: int, flip: int) -> None:
    bits = np.random.default_rng(seed).integers(0x3E00, 0x4100, 4000, dtype=np.uint16)
    sizes, low, high = planes_of(bits)
    damaged = high.copy()
    damaged[at % len(damaged)] ^= flip
    out = np.zeros_like(bits)
    try:
        join_planes(sizes, low, damaged, out)
    except ShardCorrupt:
        return
    assert out.shape == bits.shape


def test_hostile_frame_tables_are_refused() -> None:
    bits = np.random.default_rng(0).integers(0x3E00, 0x4100, 4000, dtype=np.uint16)
    sizes, low, high = planes_of(bits)
    bomb = np.frombuffer(pa.compress(bytes(1 << 24), codec="zstd", asbytes=True), np.uint8)
    out = np.zeros_like(bits)
    for table, data in (
        (np.array([-5], np.int32), high),
        (np.array([1 << 30], np.int32), high),
        (np.array([], np.int32), high),
        (np.array([3, 4], np.int32), high),
        (np.array([len(bomb)], np.int32), bomb),
        (np.array([9], np.int32), high),
    ):
        with pytest.raises(ShardCorrupt):
            join_planes(table, low, data, out)
    with pytest.raises(ShardCorrupt):
        join_planes(sizes, low[:-1], high, out)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.integers(-30, 30),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_fp8_error_bound(seed: int, tokens: int, power: int, dtype: torch.dtype) -> None:
    """|x - x'| <= max(|x| / 16, scale / 1024), then the rounding to the dtype."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 3, 32, generator=generator) * 2.0**power
    x[0, 0] = 0
    x[:, 1] *= torch.exp(3 * torch.randn(tokens, 32, generator=generator))
    x = x.to(dtype)
    scale, values = to_fp8(x)
    back = from_fp8(scale, values.view(tokens, -1), dtype).view_as(x)
    exact, found = x.double(), back.double()
    bound = torch.maximum(exact.abs() / 16, scale.double()[..., None] / 1024)
    rounding = found.abs() * (2.0**-8 if dtype is torch.bfloat16 else 2.0**-22)
    assert ((exact - found).abs() <= bound * (1 + 1e-6) + rounding).all()
    assert (back[0, 0] == 0).all()
    assert back.isfinite().all()


@settings(deadline=None)
@given(st.integers(1, 5000), st.sampled_from(sorted(SPECS)), st.sampled_from(["hidden", "topk:7", "none"]))
def test_slots_are_arithmetic(tokens: int, name: str, last: str) -> None:
    spec = SPECS[name]
    if last != "hidden":
        spec = replace(spec, last=last, last_encoding="bf16")
    layout = block_layout(spec, tokens)
    assert block_sizes(spec, np.array([tokens], np.int32))[0] == layout.total
    assert layout.states % PAD == 0
    planes = [shape[0] for name, _, shape in stored_states(spec, tokens) if name.endswith(".high")]
    smaller = block_layout(spec, tokens, [PAD] * len(planes))
    assert smaller.total <= layout.total


def write_shard(folder: Path, order: list[int], spec: CaptureSpec, failed: tuple[int, ...] = ()) -> bytes:
    dumps = [FakeDump(spec, n, seed) for seed, n in enumerate(LENGTHS)]
    shard = OpenShard(folder, "train-000000.tar", places(spec, dumps), spec)
    folder.mkdir(parents=True, exist_ok=True)
    for i in order:
        place = list(shard.places.values())[i]
        if i in failed:
            shard.give_up(place.key)
        else:
            put(shard, place, dumps[i], folder)
    row = shard.seal()
    shard.forget()
    assert row is not None
    return (folder / "data" / row.name).read_bytes()


@pytest.mark.parametrize("name", SPECS)
def test_any_order_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    order = list(range(len(LENGTHS)))
    straight = write_shard(tmp_path / "a", order, SPECS[name])
    for trial in range(3):
        random.Random(trial).shuffle(order)
        assert write_shard(tmp_path / f"b{trial}", order, SPECS[name]) == straight
    gone = write_shard(tmp_path / "c", [4, 2, 0, 1, 3], SPECS[name], failed=(1,))
    assert gone == write_shard(tmp_path / "d", [0, 1, 2, 3, 4], SPECS[name], failed=(1,))
    assert len(gone) < len(straight)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kept", [0, 2, 5])
def test_reopened_shard_keeps_what_holds(tmp_path: Path, name: str, kept: int) -> None:
    """Killed after `kept` samples, then one byte of the first one's states flipped."""
    spec = SPECS[name]
    dumps = [FakeDump(spec, n, seed) for seed, n in enumerate(LENGTHS)]
    spots = places(spec, dumps)
    shard = OpenShard(tmp_path, "train-000000.tar", spots, spec)
    for place, dump in itertools.islice(zip(spots, dumps, strict=True), kept):
        put(shard, place, dump, tmp_path)
    shard.close()
    if kept:
        data = bytearray(shard.path.read_bytes())
        data[spots[0].offset + block_layout(spec, LENGTHS[0]).states + 70] ^= 1
        shard.path.write_bytes(data)
    again = OpenShard(tmp_path, "train-000000.tar", spots, spec)
    assert set(again.records) == {place.key for place in spots[1:kept]}
    for place, dump in zip(spots, dumps, strict=True):
        if place.key not in again.records:
            put(again, place, dump, tmp_path)
    row = again.seal()
    assert row is not None
    whole = write_shard(tmp_path / "whole", list(range(len(LENGTHS))), spec)
    assert (tmp_path / "data" / row.name).read_bytes() == whole


@pytest.fixture(params=[*SPECS, "topk"])
def encoded(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, CaptureSpec, list[FakeDump]]:
    if request.param == "topk":
        spec = replace(SPEC, last="topk:6", aux_encoding="fp8")
        head = TargetHead(torch.randn(512, SPEC.width, generator=torch.Generator().manual_seed(0)))
        return tmp_path / "b", spec, make_build(tmp_path / "b", (5, 64, 300), spec=spec, head=head)
    spec = SPECS[request.param]
    return tmp_path / "b", spec, make_build(tmp_path / "b", (5, 64, 300), spec=spec)


WAYS = ("mmap", "file", "http", "cached")


@pytest.fixture(params=WAYS)
def table(
    request: pytest.FixtureRequest, encoded: tuple[Path, CaptureSpec, list[FakeDump]], tmp_path: Path
) -> Iterator[SampleTable]:
    folder = encoded[0]
    if request.param == "mmap":
        yield ShardSet.open(folder)
    elif request.param == "file":
        yield RemoteShardSet.open(f"file://{folder}")
    else:
        with FolderServer(folder) as server:
            cache = CacheConfig(tmp_path / "cache", 1 << 30) if request.param == "cached" else None
            yield RemoteShardSet.open(server.url, cache=cache)


def test_readers_undo_the_encoding(encoded: tuple[Path, CaptureSpec, list[FakeDump]], table: SampleTable) -> None:
    """Whole samples, single columns and reads into given memory: planes bit-equal, fp8 within its bound."""
    _, spec, dumps = encoded
    tops = (TOP_IDS, TOP_LOGPROBS) if spec.top_k else (LAST,)
    assert table.columns == (AUX, *tops, IDS, MASK)
    for i, dump in enumerate(dumps):
        parts = {name: table.read(i, (name,))[name] for name in table.columns}
        sample = table.read(i)
        for column, original, encoding in ((AUX, dump.aux, spec.aux_encoding), (LAST, dump.last, spec.last_encoding)):
            if column not in table.columns:
                continue
            assert sample[column].dtype is torch.bfloat16
            if encoding == "bf16-planes":
                assert torch.equal(sample[column], original)
            else:
                assert not torch.equal(sample[column], original)
                torch.testing.assert_close(sample[column], original, rtol=0.07, atol=0.01)
        assert torch.equal(sample[IDS], dump.ids)
        assert torch.equal(sample[MASK], dump.mask)
        for rows in (dump.tokens, 3):
            memory = {name: torch.empty_like(tensor[:rows]) for name, tensor in sample.items()}
            table.read_into(i, memory)
            some = {IDS: torch.empty(rows, dtype=torch.int32), AUX: torch.empty_like(memory[AUX])}
            table.read_into(i, some)
            for name, tensor in sample.items():
                assert torch.equal(parts[name], tensor)
                assert torch.equal(memory[name], tensor[:rows])
            assert torch.equal(some[AUX], sample[AUX][:rows])
            assert torch.equal(some[IDS], sample[IDS][:rows])


def test_encoded_builds_verify(encoded: tuple[Path, CaptureSpec, list[FakeDump]]) -> None:
    assert verify(encoded[0]).problems == []


def test_ids_of_encoded_samples_take_only_their_bytes(tmp_path: Path) -> None:
    make_build(tmp_path / "b", (300, 400), spec=PLANES)
    with FolderServer(tmp_path / "b") as server:
        data = RemoteShardSet.open(server.url)
        before = data.fetcher.bytes_received
        data.read(1, (IDS, MASK))
        assert data.fetcher.bytes_received - before == 1024 + 5 * 400


LIES = {
    "scale": ("fp8", {"scale": torch.zeros(4, 3, dtype=torch.int32)}),
    "values": ("fp8", {"fp8": torch.zeros(4, 3 * SPEC.width, dtype=torch.uint8)}),
    "groups": ("fp8", {"scale": torch.zeros(4, 2)}),
    "frames": ("bf16-planes", {"frames": torch.ones(1, dtype=torch.bfloat16)}),
    "frame table": ("bf16-planes", {"frames": torch.ones(1, 1, dtype=torch.int32)}),
    "low": ("bf16-planes", {"low": torch.zeros(4, 3 * SPEC.width, dtype=torch.bfloat16)}),
    "high": ("bf16-planes", {"high": torch.zeros(64, dtype=torch.float16)}),
    "high, not flat": ("bf16-planes", {"high": torch.zeros(1, 64, dtype=torch.uint8)}),
}


@pytest.mark.parametrize("case", LIES)
def test_parts_of_another_type_or_shape_are_refused(case: str) -> None:
    encoding, lie = LIES[case]
    spec = replace(SPEC, aux_encoding=encoding)
    stored = {name: torch.ones(shape, dtype=getattr(torch, kind)) for name, kind, shape in stored_states(spec, 4)}
    stored.update({f"{AUX}.{name}": tensor for name, tensor in lie.items()})
    with pytest.raises(ShardCorrupt):
        decode(spec, AUX, stored)


def test_bytes_on_disk_shrink(tmp_path: Path) -> None:
    sizes = {}
    for name, spec in {"bf16": SPEC, "planes": PLANES, "fp8": FP8}.items():
        make_build(tmp_path / name, (2000, 2000), spec=spec)
        sizes[name] = Manifest.load(tmp_path / name).nbytes
    assert sizes["planes"] < 0.8 * sizes["bf16"]
    assert sizes["fp8"] < 0.55 * sizes["bf16"]


def test_a_bad_dump_is_not_encoded(tmp_path: Path) -> None:
    dump = FakeDump(PLANES, 9, 1)
    (place,) = places(PLANES, [dump])
    shard = OpenShard(tmp_path, "train-000000.tar", [place], PLANES)
    dump.last[3, 3] += 1
    good = FakeDump(PLANES, 9, 1)
    dump.meta = good.meta  # type: ignore[method-assign]
    with pytest.raises(DumpCorrupt, match="checksum"):
        put(shard, place, dump, tmp_path)
    assert shard.pending == [place.key]


def test_planes_need_bfloat16() -> None:
    with pytest.raises(ConfigError, match="bf16-planes splits bfloat16 numbers, the server's states are float32"):
        replace(PLANES, dtype="float32")
    with pytest.raises(ConfigError, match="not one of hidden, topk:K, none"):
        replace(SPEC, last="topk:0")
    with pytest.raises(ConfigError, match="no last state is stored"):
        replace(PLANES, last="none")


def test_verify_finds_a_flipped_byte_in_an_encoded_state(tmp_path: Path) -> None:
    make_build(tmp_path / "b", (50, 60), per_shard=2, spec=FP8)
    path = tmp_path / "b/data/train-000000.tar"
    data = bytearray(path.read_bytes())
    row = ShardSet.open(tmp_path / "b").index.slice(1, 1).to_pylist()[0]
    data[row["offset"] + 5000] ^= 1
    path.write_bytes(data)
    (problem,) = verify(tmp_path / "b").problems
    assert "train-000000.tar: sample 00000001: its states are not what was stored" in str(problem)
    assert "last good sample: 00000000" in str(problem)


def test_c67_cut_shard_names_shard_and_last_good_key(tmp_path: Path) -> None:
    """One of ten shards, cut at random bytes; the nine others are still checked."""
    make_build(tmp_path / "b", range(10, 40), per_shard=3, spec=PLANES)
    path, chooser = tmp_path / "b/data/train-000004.tar", random.Random(3)
    whole = path.read_bytes()
    index = [row for row in ShardSet.open(tmp_path / "b").index.to_pylist() if row["shard"] == path.name]
    for _ in range(10):
        cut = chooser.randrange(1, len(whole) - 1024)
        path.write_bytes(whole[:cut])
        good = [row["key"] for row in index if row["offset"] + row["nbytes"] <= cut]
        report = verify(tmp_path / "b")
        (problem,) = report.problems
        assert problem.shard == path.name
        assert problem.last_good_key == (good[-1] if good else "")
        assert report.samples == 27 + len(good)


def test_top_k_is_the_heads_distribution(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    head = TargetHead(torch.randn(512, 64, generator=generator))
    last = torch.randn(33, 64, generator=generator)
    ids, logprobs = head.top(last, 16)
    expected = (last @ head.weight.T).log_softmax(-1)
    assert torch.equal(ids[:, 0].long(), expected.argmax(-1))
    torch.testing.assert_close(expected.gather(1, ids.long()), logprobs.float(), rtol=1e-3, atol=1e-3)
    spec = replace(SPEC, last="topk:16")
    dump = FakeDump(spec, 33, 5)
    (place,) = places(spec, [dump])
    shard = OpenShard(tmp_path, "train-000000.tar", [place], spec, head)
    put(shard, place, dump, tmp_path)
    assert shard.seal() is not None
    layout = block_layout(spec, 33)
    assert layout.state_bytes == 33 * (3 * 64 * 2 + 16 * 6)
    assert TOP_IDS in dict.fromkeys(name for name, _, _ in stored_states(spec, 33))
    assert TOP_LOGPROBS in {name for name, _, _ in spec.tensors(33)}
