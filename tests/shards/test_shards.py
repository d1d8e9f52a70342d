"""Shards: written in any order the bytes are the same, read back they are the dump's, broken they say so."""

from __future__ import annotations

import io
import os
import pickle
import random
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.builds
from eagle3_data import durable
from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import ConfigError, DumpCorrupt, ShardCorrupt
from eagle3_data.manifest import Manifest
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from eagle3_data.shards import OpenShard, ShardSet, index
from eagle3_data.shards.layout import block_layout, block_sizes
from eagle3_data.shards.moves import digest_range
from eagle3_data.shards.reader import parse_header
from eagle3_data.shards.writer import notes_path
from tests.builds import SPEC, FakeDump, make_build, places, put, raw

LENGTHS = (5, 64, 3, 100, 17)


def write_shard(folder: Path, order: list[int], spec: CaptureSpec = SPEC, failed: tuple[int, ...] = ()) -> bytes:
    dumps = [FakeDump(spec, n, seed) for seed, n in enumerate(LENGTHS)]
    spots = places(spec, dumps)
    folder.mkdir(parents=True)
    shard = OpenShard(folder, "train-000000.tar", spots, spec)
    for i in order:
        if i in failed:
            shard.give_up(spots[i].key)
        else:
            put(shard, spots[i], dumps[i], folder)
    row = shard.seal()
    shard.forget()
    assert row is not None
    data = (folder / "data" / row.name).read_bytes()
    assert (len(data), row.samples) == (row.nbytes, len(LENGTHS) - len(failed))
    return data


@given(st.integers(1, 5000), st.sampled_from(["hidden", "none"]), st.sampled_from(["bfloat16", "float32"]))
def test_layout_is_arithmetic(tokens: int, last: str, dtype: str) -> None:
    spec = CaptureSpec(model="m", layers=(1, 2, 3), width=64, dtype=dtype, last=last)  # type: ignore[arg-type]
    layout = block_layout(spec, tokens)
    assert layout.total % 512 == 0
    assert layout.states % 64 == 0
    assert block_sizes(spec, np.array([tokens], np.int32))[0] == layout.total
    assert layout.tail + 5 * tokens <= layout.total


@pytest.mark.parametrize("last", ["hidden", "none"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_read_back_is_bit_equal(tmp_path: Path, dtype: str, last: str) -> None:
    spec = CaptureSpec(model="m", layers=(1, 2, 3), width=64, dtype=dtype, last=last, vocab_size=512)  # type: ignore[arg-type]
    dumps = make_build(tmp_path / "b", spec=spec)
    data = ShardSet.open(tmp_path / "b")
    assert len(data) == len(dumps)
    assert data.tokens.tolist() == [dump.tokens for dump in dumps]
    for i, dump in enumerate(dumps):
        sample = data.read(i)
        assert torch.equal(sample[AUX], dump.aux)
        assert torch.equal(sample[IDS], dump.ids)
        assert torch.equal(sample[MASK], dump.mask)
        assert sample[AUX].dtype is getattr(torch, dtype)
        if last == "hidden":
            assert torch.equal(sample[LAST], dump.last)
        else:
            with pytest.raises(ConfigError, match="no column 'last_hidden_state'"):
                data.read(i, (LAST,))


def test_any_order_gives_the_same_bytes(tmp_path: Path) -> None:
    order = list(range(len(LENGTHS)))
    straight = write_shard(tmp_path / "a", order)
    for trial in range(5):
        random.Random(trial).shuffle(order)
        assert write_shard(tmp_path / f"b{trial}", order) == straight


def test_failed_samples_leave_no_gap(tmp_path: Path) -> None:
    data = write_shard(tmp_path / "a", [4, 2, 0, 1, 3], failed=(1, 4))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = tar.getnames()
    assert [name for name in names if name.endswith(".json")] == ["00000000.json", "00000002.json", "00000003.json"]
    assert write_shard(tmp_path / "b", [3, 0, 2, 4, 1], failed=(1, 4)) == data


def test_plain_tools_read_it(tmp_path: Path) -> None:
    dumps = make_build(tmp_path / "b")
    with tarfile.open(tmp_path / "b" / "data" / "train-000001.tar") as tar:
        names = tar.getnames()
        assert names == ["00000002.json", "00000002.safetensors", "00000003.json", "00000003.safetensors"]
        member = tar.extractfile("00000003.safetensors")
        assert member is not None
        tensors = safetensors.torch.load(member.read())
    assert torch.equal(tensors[AUX], dumps[3].aux)
    assert torch.equal(tensors[LAST], dumps[3].last)


def test_state_tensors_are_aligned(tmp_path: Path) -> None:
    make_build(tmp_path / "b")
    sample = ShardSet.open(tmp_path / "b").read(3)
    assert sample[AUX].data_ptr() % 64 == 0
    assert sample[LAST].data_ptr() % 64 == 0


def test_pickles(tmp_path: Path) -> None:
    dumps = make_build(tmp_path / "b")
    again = pickle.loads(pickle.dumps(ShardSet.open(tmp_path / "b")))
    assert torch.equal(again.read(1)[AUX], dumps[1].aux)


@settings(deadline=None, max_examples=30)
@given(damage=st.integers(0, 2**30), kept=st.integers(0, 5))
def test_reopened_shard_keeps_only_what_holds(tmp_path_factory: pytest.TempPathFactory, damage: int, kept: int) -> None:
    """A crash after `kept` samples, one byte of the file flipped: no wrong sample is kept, no right one lost."""
    folder = tmp_path_factory.mktemp("crash")
    dumps = [FakeDump(SPEC, n, seed) for seed, n in enumerate(LENGTHS)]
    spots = places(SPEC, dumps)
    shard = OpenShard(folder, "train-000000.tar", spots, SPEC)
    for place, dump in list(zip(spots, dumps, strict=True))[:kept]:
        put(shard, place, dump, folder)
    shard.close()
    hit = None
    if kept:
        data = bytearray(shard.path.read_bytes())
        at = damage % len(data)
        data[at] ^= 0xFF
        shard.path.write_bytes(data)
        hit = next(p.key for p in reversed(spots) if p.offset <= at)
    again = OpenShard(folder, "train-000000.tar", spots, SPEC)
    expected = {place.key for place in spots[:kept]} - {hit}
    assert set(again.records) == expected
    for place, dump in zip(spots, dumps, strict=True):
        if place.key not in again.records:
            put(again, place, dump, folder)
    row = again.seal()
    assert row is not None
    whole = write_shard(folder / "whole", list(range(len(LENGTHS))))
    assert (folder / "data" / row.name).read_bytes() == whole


@pytest.mark.parametrize("encoding", ["bf16", "bf16-planes"])
def test_a_flipped_bit_in_the_notes_costs_one_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: Literal["bf16", "bf16-planes"]
) -> None:
    spec = replace(SPEC, aux_encoding=encoding, last_encoding=encoding)
    dumps = [FakeDump(spec, n, seed) for seed, n in enumerate((5, 8, 3))]
    spots = places(spec, dumps)
    shard = OpenShard(tmp_path, "train-000000.tar", spots, spec)
    for place, dump in zip(spots, dumps, strict=True):
        put(shard, place, dump, tmp_path)
    shard.close()
    notes = notes_path(tmp_path, "train-000000.tar")
    whole = notes.read_bytes()
    start, end = whole.index(b"\n") + 1, whole.index(b"\n", whole.index(b"\n") + 1)
    monkeypatch.setattr(durable, "fsync_file", lambda path: None)
    monkeypatch.setattr(durable, "fsync_dir", lambda path: None)
    lost = 0
    for at in range(start, end):
        for bit in (0, 1, 7):
            notes.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            again = OpenShard(tmp_path, "train-000000.tar", spots, spec)
            again.close()
            assert {spots[0].key, spots[2].key} <= set(again.records), (at, bit)
            assert again.records == {key: shard.records[key] for key in again.records}, (at, bit)
            lost += spots[1].key not in again.records
    assert lost > 2 * (end - start)
    again = OpenShard(tmp_path, "train-000000.tar", spots, spec)
    put(again, spots[1], dumps[1], tmp_path)
    row = again.seal()
    assert row is not None
    assert row.samples == 3


def test_wrong_checksum_is_not_placed(tmp_path: Path) -> None:
    dump = FakeDump(SPEC, 9, 1)
    shard = OpenShard(tmp_path, "train-000000.tar", places(SPEC, [dump]), SPEC)
    path = dump.save(tmp_path / "d")
    data = bytearray(path.read_bytes())
    data[-500] ^= 1
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    states_at = len(data) - len(raw(dump.aux)) - len(raw(dump.last)) - 4 * dump.tokens
    with pytest.raises(DumpCorrupt, match="checksum"):
        shard.write(dump.record("00000000"), fd, states_at, dump.ids.tolist(), raw(dump.mask))
    path.write_bytes(data[:-800])
    with pytest.raises(DumpCorrupt, match="early"):
        shard.write(dump.record("00000000"), fd, states_at, dump.ids.tolist(), raw(dump.mask))
    os.close(fd)
    assert shard.pending == ["00000000"]


def test_cut_shard_names_sample(tmp_path: Path) -> None:
    make_build(tmp_path / "b")
    path = tmp_path / "b" / "data" / "train-000001.tar"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ShardCorrupt, match=r"train-000001\.tar, sample 00000003"):
        ShardSet.open(tmp_path / "b").read(3)
    path.unlink()
    with pytest.raises(ShardCorrupt, match="not in its data"):
        ShardSet.open(tmp_path / "b").read(3)


@given(st.binary(max_size=300))
def test_hostile_headers_are_refused_not_followed(data: bytes) -> None:
    with pytest.raises(ShardCorrupt):
        parse_header(data, len(data))


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}',
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}',
        '{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,-4]}}',
        '{"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"U8","shape":[99999999999],"data_offsets":[0,99999999999]}}',
        '["a"]',
    ],
)
def test_lying_headers_are_refused(text: str) -> None:
    data = len(text).to_bytes(8, "little") + text.encode() + bytes(8)
    with pytest.raises(ShardCorrupt):
        parse_header(data, len(data))


def test_hidden_file_is_never_the_shard(tmp_path: Path) -> None:
    dump = FakeDump(SPEC, 9, 1)
    shard = OpenShard(tmp_path, "train-000000.tar", places(SPEC, [dump]), SPEC)
    put(shard, places(SPEC, [dump])[0], dump, tmp_path)
    visible = [p.name for p in (tmp_path / "data").iterdir() if not p.name.startswith(".")]
    assert visible == []
    assert shard.path == durable.hidden(shard.final)


def test_an_index_that_is_consolidated_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader beside a builder that ends: the parts are gone after it has seen that there is no whole."""
    monkeypatch.setattr(tests.builds, "consolidate", lambda folder, manifest: None)
    make_build(tmp_path, [5, 9, 7], per_shard=1)
    manifest, real = Manifest.load(tmp_path), index.part_path

    def last_moment(folder: Path, shard: str) -> Path:
        monkeypatch.setattr(index, "part_path", real)
        index.consolidate(tmp_path, manifest)
        return real(folder, shard)

    monkeypatch.setattr(index, "part_path", last_moment)
    assert index.read_index(tmp_path, manifest).num_rows == 3
    index.whole_path(tmp_path, "train").unlink()
    with pytest.raises(ShardCorrupt, match=r"train-000000\.tar is in the manifest and not in"):
        index.read_index(tmp_path, manifest)


def test_a_digest_through_a_small_buffer_is_that_of_the_bytes_and_sees_an_early_end(tmp_path: Path) -> None:
    path, data = tmp_path / "file", bytes(range(256)) * 41
    path.write_bytes(data)
    with path.open("rb") as file:
        for start, end in ((0, len(data)), (5, 5), (17, 4099)):
            digest = xxhash.xxh3_128()
            digest_range(digest, file.fileno(), start, end, memoryview(bytearray(1000)))
            assert digest.hexdigest() == xxhash.xxh3_128_hexdigest(data[start:end])
        with pytest.raises(DumpCorrupt, match="3 bytes early"):
            digest_range(xxhash.xxh3_128(), file.fileno(), 10, len(data) + 3, memoryview(bytearray(1000)))
