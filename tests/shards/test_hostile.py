"""Shards from strangers: archives and headers made to hurt are refused, and random damage is never believed.

`python -m tests.shards.test_hostile [SECONDS]` runs the fuzzer longer than the tests do (`make fuzz`).
"""

from __future__ import annotations

import io
import json
import mmap
import random
import resource
import struct
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3_data.errors import Eagle3Error, ShardCorrupt
from eagle3_data.protocol import AUX, IDS, MASK
from eagle3_data.shards import ShardSet, open_samples
from eagle3_data.shards.reader import parse_header, tensors_at
from eagle3_data.shards.tarwalk import samples
from eagle3_data.verify import verify
from tests.builds import make_build

LENGTHS = (5, 9, 3)
CI_ROUNDS = 250


def walk(data: bytes) -> list[str]:
    view = mmap.mmap(-1, max(len(data), 1))
    view[: len(data)] = data
    return [sample.record.key for sample in samples(view)]


def archive(members: list[tarfile.TarInfo | tuple[str, bytes]], kind: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member, io.BytesIO(bytes(member.size)))
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return out.getvalue()


def special(kind: bytes, name: str = "00000000.json", link: str = "/etc/passwd") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def shard_members(folder: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(folder / "data" / "train-000000.tar") as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "b"
    make_build(folder, LENGTHS, per_shard=3)
    return folder


def test_the_good_archive_is_walked(good: Path) -> None:
    assert walk(archive(list(shard_members(good)))) == ["00000000", "00000001", "00000002"]


@pytest.mark.parametrize(
    "name",
    ["/etc/cron.d/x.json", "../00000000.json", "a/../../b.json", "./00000000.json", "data/00000000.json", ".json",
     "0" * 90 + ".json", "00000000.pkl", "00000000.pth", "00000000.py", "00000000.json.gz", "c:\\x.json", "0\n.json",
     "é.json"],
)  # fmt: skip
def test_names_that_are_not_ours(name: str) -> None:
    with pytest.raises(ShardCorrupt):
        walk(archive([(name, b"{}")]))


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE,
     tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE, b"V"],
)  # fmt: skip
def test_links_devices_and_extensions(kind: bytes) -> None:
    with pytest.raises(ShardCorrupt):
        walk(special(kind).tobuf(tarfile.USTAR_FORMAT) + bytes(1024))


@pytest.mark.parametrize("format_", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_by_extension_headers(format_: int) -> None:
    """A pax or GNU header could rename the member behind the walker's back, or take gigabytes to read."""
    with pytest.raises(ShardCorrupt):
        walk(archive([("x" * 300 + ".json", b"{}")], format_))


def test_sizes_that_lie() -> None:
    for size in (1 << 33, (1 << 33) - 1, 600):
        info = tarfile.TarInfo("00000000.json")
        info.size = size
        try:
            head = info.tobuf(tarfile.USTAR_FORMAT)
        except ValueError:
            head = info.tobuf(tarfile.GNU_FORMAT)  # base-256
        with pytest.raises(ShardCorrupt):
            walk(head + bytes(512))
    negative = bytearray(tarfile.TarInfo("00000000.json").tobuf(tarfile.USTAR_FORMAT))
    negative[124:136] = b"\xff" * 12
    negative[148:156] = b"%06o\0 " % (256 + sum(negative[:148]) + sum(negative[156:512]))
    with pytest.raises(ShardCorrupt):
        walk(bytes(negative) + bytes(1024))


def test_order_of_members(good: Path) -> None:
    """Interleaved, doubled, orphaned or foreign members."""
    a, b, c, d, *_ = shard_members(good)
    for members in ([a, c, b, d], [a, d], [b, a], [a], [b], [a, a, b], [a, b, b], [c, b], [("00000001.json", a[1]), d]):
        with pytest.raises(ShardCorrupt):
            walk(archive(list(members)))
    for text in (
        b"{",
        b"[]",
        b"{}",
        b'{"key": 7}',
        b"\xff\xfe",
        b'{"key":"00000000","__class__":"os.system"}',
        b"[" * 5000,
    ):
        with pytest.raises(ShardCorrupt):
            walk(archive([("00000000.json", text), b]))


HEADERS = {
    "overlap": {"a": ("U8", [4], [0, 4]), "b": ("U8", [4], [2, 6])},
    "same place": {"a": ("U8", [8], [0, 8]), "b": ("U8", [8], [0, 8])},
    "gap": {"a": ("U8", [4], [0, 4]), "b": ("U8", [2], [6, 8])},
    "past the end": {"a": ("U8", [99], [0, 99])},
    "backwards": {"a": ("U8", [4], [4, 0]), "b": ("U8", [8], [0, 8])},
    "negative": {"a": ("U8", [8], [-8, 0])},
    "size of shape": {"a": ("F32", [8], [0, 8])},
    "overflow": {"a": ("U8", [1 << 62, 4], [0, 8])},
    "huge dims": {"a": ("U8", [1 << 31] * 40, [0, 8])},
    "negative dims": {"a": ("U8", [-2, -4], [0, 8])},
    "zero dims": {"a": ("U8", [0, 1 << 60], [0, 0])},
    "float dims": {"a": ("U8", [8.5], [0, 8])},
    "text dims": {"a": ("U8", ["8"], [0, 8])},
    "dtype": {"a": ("F64", [1], [0, 8])},
    "dtype list": {"a": (["U8"], [8], [0, 8])},
    "three offsets": {"a": ("U8", [8], [0, 4, 8])},
    "no shape": {"a": ("U8", None, [0, 8])},
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_lie(case: str) -> None:
    header = {name: {"dtype": d, "shape": s, "data_offsets": o} for name, (d, s, o) in HEADERS[case].items()}
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(8)
    with pytest.raises(ShardCorrupt):
        parse_header(data, len(data))


@pytest.mark.parametrize("size", [0, 1, 7, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_header_lengths_that_lie(size: int) -> None:
    data = struct.pack("<Q", size) + b"{}" + bytes(100)
    with pytest.raises(ShardCorrupt):
        parse_header(data, len(data))


def test_deep_json_is_no_crash() -> None:
    for text in (b"[" * 100_000, b'{"a":' * 50_000):
        data = struct.pack("<Q", len(text)) + text
        with pytest.raises(ShardCorrupt):
            parse_header(data, len(data))


def test_duplicate_names_in_a_header() -> None:
    entry = '{"dtype":"U8","shape":[8],"data_offsets":[0,8]}'
    text = f'{{"a":{entry},"a":{entry}}}'.encode()
    data = struct.pack("<Q", len(text)) + text + bytes(8)
    with pytest.raises(ShardCorrupt, match="twice"):
        parse_header(data, len(data))


# ------------------------------------------------------------- fuzz


def mutate(data: bytearray, draw: random.Random) -> bytearray:
    """One to four of: a flipped bit, an interesting number, a moved, doubled, dropped or zeroed piece."""
    for _ in range(draw.randint(1, 4)):
        at, kind = draw.randrange(len(data)), draw.randrange(6)
        if draw.random() < 0.6:  # headers are few among the bytes, and what attacks aim at
            at = min(len(data) - 1, draw.choice([0, 512, 1536, 2048, 2560]) + draw.randrange(512))
        size = draw.choice([1, 4, 8, 12, 512, 1024])
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at : at + 8] = struct.pack("<Q", draw.choice([0, 1, 511, 1 << 31, 1 << 40, (1 << 64) - 1]))
        elif kind == 2:
            data[at : at + size] = bytes(size)
        elif kind == 3:
            data[at:at] = data[at : at + size]
        elif kind == 4:
            del data[at : at + size]
        else:
            data[at : at + 4] = draw.choice([b"-1,0", b"9999", b"][}{", b"\xff\xff\xff\xff", b"1e99"])
    return data


class Fuzz:
    """Damage one shard again and again; the walker, the verifier and both readers must refuse or be right."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.dumps = make_build(folder, LENGTHS, per_shard=3)
        self.folder, self.path = folder, folder / "data" / "train-000000.tar"
        self.good, self.draw = self.path.read_bytes(), random.Random(seed)
        self.refused = self.right = self.changed = 0

    def round(self) -> None:
        data = bytes(mutate(bytearray(self.good), self.draw))
        self.path.write_bytes(data)
        self._one(lambda: walk(data))
        if data != self.good:
            assert not verify(self.folder, workers=1).ok, "verify called a damaged shard good"
        for where in (str(self.folder), f"file://{self.folder}"):
            self._one(lambda where=where: self._read(where))  # type: ignore[misc]

    def _one(self, action: Callable[[], object]) -> None:
        try:
            action()
        except ShardCorrupt:
            self.refused += 1

    def _read(self, where: str) -> None:
        """Every tensor is of the manifest's form, whatever the bytes are."""
        table = open_samples(where)
        for i, dump in enumerate(self.dumps):
            sample = table.read(i)
            assert sample[AUX].shape == dump.aux.shape
            assert sample[AUX].dtype == dump.aux.dtype
            assert sample[IDS].dtype is torch.int32
            assert len(sample[MASK]) == dump.tokens
            equal = all(torch.equal(sample[n], t) for n, t in ((AUX, dump.aux), (IDS, dump.ids), (MASK, dump.mask)))
            self.right, self.changed = self.right + equal, self.changed + (not equal)


def test_fuzz(tmp_path: Path) -> None:
    """Short form; the same seed, the same rounds. Memory stays small whatever a header claims."""
    fuzz = Fuzz(tmp_path / "b", seed=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(CI_ROUNDS):
        fuzz.round()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10
    assert min(fuzz.refused, fuzz.right) > CI_ROUNDS // 10


def test_nothing_else_escapes(good: Path) -> None:
    """The readers raise the family's errors alone for members cut at every length."""
    data = ShardSet.open(good)
    start, nbytes = int(data.offsets[0]), int(data.nbytes[0])
    member = (good / "data" / "train-000000.tar").read_bytes()[start : start + nbytes]
    for size in range(600):
        with pytest.raises(Eagle3Error):
            tensors_at(memoryview(bytearray(member[:size])), 0, size, (AUX,))


def main(seconds: float) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}, {seconds:.0f} s")
    with tempfile.TemporaryDirectory(prefix="eagle3-fuzz-") as folder:
        fuzz, end, rounds = Fuzz(Path(folder) / "b", seed), time.monotonic() + seconds, 0
        while time.monotonic() < end:
            fuzz.round()
            rounds += 1
    found = f"{fuzz.refused:,} refused, {fuzz.right:,} samples right, {fuzz.changed:,} of other values"
    print(f"{rounds:,} rounds: {found}")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
