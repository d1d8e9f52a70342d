"""What `verify` finds: each damage is sealed again with right checksums, so that one check alone can see it."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from eagle3_data.errors import ShardCorrupt
from eagle3_data.hub.digest import file_xxh3
from eagle3_data.manifest import Manifest
from eagle3_data.shards import ShardSet
from eagle3_data.shards.index import INDEX_SCHEMA, part_path
from eagle3_data.shards.layout import SampleRecord
from eagle3_data.verify import verify
from tests.builds import SPEC, FakeDump, make_build

SHARD = "train-000001.tar"
"""Holds samples 2 and 3 of six."""


def reseal(folder: Path, name: str = SHARD) -> None:
    """The manifest now says what is on disk."""
    path, manifest = folder / "data" / name, Manifest.load(folder)
    rows = [
        row.model_copy(update={"nbytes": path.stat().st_size, "xxh3": file_xxh3(path)}) if row.name == name else row
        for row in manifest.shards
    ]
    manifest.model_copy(update={"shards": tuple(rows)}).save(folder)


def members(path: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(path) as tar:
        return [(info, file.read() if (file := tar.extractfile(info)) else b"") for info in tar]


def rewrite(folder: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]) -> None:
    """The shard with other members, sealed again."""
    path = folder / "data" / SHARD
    found = members(path)
    change(found)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for info, data in found:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    reseal(folder)


def swap_members(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    found[0], found[1] = found[1], found[0]


def drop_json(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    del found[2]


def drop_states(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    del found[3]


def add_stranger(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    found.append((tarfile.TarInfo("run.py"), b"print()"))


def add_link(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    link = tarfile.TarInfo("00000009.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
    found.append((link, b""))


def other_key(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    for info, _ in found[2:]:
        info.name = info.name.replace("00000003", "00000007")


def other_ids(found: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    """Token 1 of sample 3 is another; states, mask and record are the old ones."""
    info, data = found[3]
    array = bytearray(data)
    at = len(array) - 512
    ids_at = bytes(array).rindex(torch.tensor(FakeDump(SPEC, 100, 3).ids).numpy().tobytes())
    assert ids_at > at - 4096
    array[ids_at + 4] ^= 1
    found[3] = (info, bytes(array))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap_members, "does not follow its json"),
        (drop_json, "does not follow its json"),
        (drop_states, "00000003 has no safetensors member"),
        (add_stranger, "'run.py' at byte"),
        (add_link, "'00000009.json' at byte"),
        (other_key, "00000007.json names sample 00000003"),
        (other_ids, "its ids do not give its ids digest"),
    ],
)
def test_members(tmp_path: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None], words: str) -> None:
    make_build(tmp_path / "b")
    rewrite(tmp_path / "b", change)
    (problem,) = [problem for problem in verify(tmp_path / "b").problems if problem.shard]
    assert words in problem.what
    assert problem.shard == SHARD


def build_with(folder: Path, change: Callable[[list[FakeDump]], None]) -> None:
    dumps = [FakeDump(SPEC, tokens, seed) for seed, tokens in enumerate((5, 64, 3, 100, 17, 8))]
    change(dumps)
    make_build(folder, dumps=dumps)


def not_a_number(dumps: list[FakeDump]) -> None:
    dumps[3].aux[7, 11] = float("nan")


def infinite(dumps: list[FakeDump]) -> None:
    dumps[3].last[99, 0] = float("inf")


def two_in_the_mask(dumps: list[FakeDump]) -> None:
    dumps[3].mask[0] = 2


def lies(**changes: object) -> Callable[[list[FakeDump]], None]:
    def change(dumps: list[FakeDump]) -> None:
        honest = dumps[3].record

        def record(key: str) -> SampleRecord:
            return replace(honest(key), **changes)  # type: ignore[arg-type]

        dumps[3].record = record  # type: ignore[method-assign]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (not_a_number, "NaN or Inf in its states"),
        (infinite, "NaN or Inf in its states"),
        (two_in_the_mask, "its loss mask"),
        (lies(supervised=1), "its loss mask does not have 1 ones"),
        (lies(ids_digest="0" * 32), "its ids do not give its ids digest"),
    ],
)
def test_contents(tmp_path: Path, change: Callable[[list[FakeDump]], None], words: str) -> None:
    build_with(tmp_path / "b", change)
    (problem,) = verify(tmp_path / "b").problems
    assert problem.what.startswith("sample 00000003: ")
    assert words in problem.what
    assert (problem.shard, problem.last_good_key) == (SHARD, "00000002")


def damage(folder: Path, kind: str) -> None:
    manifest = Manifest.load(folder)
    path = folder / "data" / SHARD
    if kind == "a byte":
        data = bytearray(path.read_bytes())
        data[2000] ^= 1
        path.write_bytes(data)
    elif kind == "gone":
        path.unlink()
    elif kind == "longer":
        path.write_bytes(path.read_bytes() + bytes(512))
    elif kind == "a stranger":
        shutil.copy(path, path.with_name("train-000009.tar"))
    elif kind == "another width":
        capture = {**manifest.capture, "width": 32}
        manifest.model_copy(update={"capture": capture}).save(folder)
    elif kind == "fewer layers":
        capture = {**manifest.capture, "layers": [1, 3]}
        manifest.model_copy(update={"capture": capture}).save(folder)
    elif kind == "more samples":
        rows = [row.model_copy(update={"samples": 3}) if row.name == SHARD else row for row in manifest.shards]
        manifest.model_copy(update={"shards": tuple(rows)}).save(folder)
    elif kind == "planned more":
        plan = manifest.plan.model_copy(update={"samples": 9})
        manifest.model_copy(update={"plan": plan}).save(folder)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("a byte", f"{SHARD}: "),
        ("gone", f"{SHARD}: "),
        ("longer", "bytes, the manifest says"),
        ("a stranger", "data/train-000009.tar is not in the manifest"),
        ("another width", "expected bfloat16 [5, 96]"),
        ("fewer layers", "expected bfloat16 [5, 128]"),
        ("more samples", "2 samples with 103 tokens, the manifest says 3"),
        ("planned more", "saved 6 + failed 0 + skipped 0 != planned 9"),
    ],
)
def test_manifest_against_shards(tmp_path: Path, kind: str, words: str) -> None:
    make_build(tmp_path / "b")
    assert verify(tmp_path / "b").problems == []
    damage(tmp_path / "b", kind)
    problems = "\n".join(map(str, verify(tmp_path / "b").problems))
    assert words in problems


def test_a_sample_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shards with the same keys, both in manifest and index."""
    import tests.builds as builds

    real = builds.places
    monkeypatch.setattr(builds, "places", lambda spec, dumps, first=0: real(spec, dumps, 0))
    make_build(tmp_path / "b", (5, 64, 5, 64))
    problems = "\n".join(map(str, verify(tmp_path / "b").problems))
    assert "sample 00000000" in problems
    assert "train-000001.tar" in problems
    monkeypatch.setattr("eagle3_data.verify._index_rows", lambda index: None)
    twice = [problem.what for problem in verify(tmp_path / "b").problems]
    assert twice == [f"sample 0000000{i} is also in train-000000.tar" for i in range(2)]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([0, 1, 2, 2, 3, 4, 5], "do not stand together, or are not all there"),
        ([0, 2, 1, 3, 4, 5], "do not stand together"),
        ([0, 1, 3, 2, 4, 5], "behind a later one"),
        ([2, 3, 0, 1, 4, 5], "behind a later one"),
        ([0, 1, 2, 2, 4, 5], "stands twice"),
    ],
)
def test_an_index_with_rows_twice_or_out_of_order(tmp_path: Path, rows: list[int], words: str) -> None:
    make_build(tmp_path / "b")
    path = tmp_path / "b" / "index" / "train.parquet"
    pq.write_table(pq.read_table(path).take(pa.array(rows)).cast(INDEX_SCHEMA), path)
    assert words in "\n".join(map(str, verify(tmp_path / "b").problems))


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def pages(data: bytes) -> bytes:
    """Its footer is whole, what it points to is not."""
    return data[:4] + bytes(len(data) // 2) + data[4 + len(data) // 2 :]


def garbage(data: bytes) -> bytes:
    return b"PAR1garbage"


@pytest.mark.parametrize("change", [cut, pages, garbage])
@pytest.mark.parametrize("part", [False, True])
def test_a_damaged_index_is_said_with_what_to_do(tmp_path: Path, part: bool, change: Callable[[bytes], bytes]) -> None:
    folder = tmp_path / "b"
    make_build(folder)
    path = folder / "index" / "train.parquet"
    if part:  # as while a build runs
        table, name = pq.read_table(path), "train-000001.tar"
        for row in Manifest.load(folder).shards:
            part_path(folder, row.name).parent.mkdir(exist_ok=True)
            pq.write_table(table.filter(pa.compute.equal(table.column("shard"), row.name)), part_path(folder, row.name))
        path.unlink()
        path = part_path(folder, name)
    assert verify(folder).problems == []
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ShardCorrupt, match=rf"{path.name} is damaged(.|\n)*next: .*mirror"):
        ShardSet.open(folder)
    (problem,) = verify(folder).problems
    assert f"{path.name} is damaged" in problem.what
