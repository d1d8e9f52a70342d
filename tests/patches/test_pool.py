"""The writers: whole dumps, error records, a full disk, the high-water mark, prompts that never end."""

from __future__ import annotations

import errno
import json
import os
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from eagle3_data.patches.sglang import pool as pool_module
from eagle3_data.patches.sglang.dumps import Dump, DumpForm
from eagle3_data.patches.sglang.pool import WriterPool, remove_stale
from eagle3_data.protocol import AUX, IDS, LAST, DumpError, SpoolConfig, ids_digest
from tests.servers import read_dump

FORM = DumpForm(layers=(1, 3), width=16, dtype="bfloat16", instance="test")
ROW = FORM.row_bytes


class Rows:
    """Rows of a prompt with known values; counts releases."""

    def __init__(self, rows: int, seed: int = 0, *, finite: bool = True, next_token: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.aux_t = torch.randn(rows, 32, generator=generator).to(torch.bfloat16)
        self.last_t = torch.randn(rows, 16, generator=generator).to(torch.bfloat16)
        self.aux = memoryview(self.aux_t.view(torch.uint8).reshape(-1).numpy())
        self.last = memoryview(self.last_t.view(torch.uint8).reshape(-1).numpy())
        self._finite, self._next, self.released = finite, next_token, 0

    def finite(self) -> bool:
        return self._finite

    def next_token(self) -> int:
        return self._next

    def release(self) -> None:
        self.released += 1


def dump(name: str, tokens: int) -> Dump:
    return Dump(f"e3d-r-{name}-0", array("i", range(5, 5 + tokens)))


def settled(check: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Wait until `check` gives something true."""
    deadline = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)
    return found


MakePool = Callable[..., WriterPool]


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    pools: list[WriterPool] = []

    def make(**settings: Any) -> WriterPool:
        pools.append(WriterPool(tmp_path, SpoolConfig(**{"writers": 3, **settings}), FORM))
        return pools[-1]

    yield make
    for made in pools:
        made.close(2.0)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_prompt_in_chunks_becomes_one_whole_dump(make_pool: MakePool, tmp_path: Path) -> None:
    pool, one, parts = make_pool(), dump("a", 10), [Rows(4, 1), Rows(4, 2), Rows(2, 3, next_token=11)]
    for start, rows in zip((0, 4, 8), parts, strict=True):
        pool.add(one, start, rows)
    path = tmp_path / "e3d-r-a-0.safetensors"
    settled(path.exists)
    settled(lambda: pool.written)
    meta, tensors = read_dump(path)
    assert (meta.rid, meta.tokens, meta.next_token, meta.finite) == ("e3d-r-a-0", 10, 11, True)
    assert meta.ids_digest == ids_digest(list(one.ids))
    assert torch.equal(tensors[AUX], torch.cat([rows.aux_t for rows in parts]))
    assert torch.equal(tensors[LAST], torch.cat([rows.last_t for rows in parts]))
    assert tensors[IDS].tolist() == list(one.ids)
    sums = [xxhash.xxh3_128(b"".join(bytes(getattr(rows, name)) for rows in parts)) for name in ("aux", "last")]
    assert meta.checksum == ":".join(total.hexdigest() for total in sums)
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert header % 64 == 0
    assert path.stat().st_size == header + 10 * ROW + 40
    assert path.stat().st_mode & 0o777 == 0o660
    assert [rows.released for rows in parts] == [1, 1, 1]
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("most", [1, 7, 100, 1 << 20])
def test_a_prompt_in_one_piece_is_one_write_or_as_many_as_the_system_makes_of_it(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real, calls = os.pwritev, []

    def some(file: int, pieces: list[memoryview], at: int) -> int:
        calls.append(at)
        return real(file, [pieces[0][:most]] if most < 1 << 20 else pieces, at)

    monkeypatch.setattr(os, "pwritev", some)
    pool, one, rows = make_pool(), dump("a", 6), Rows(6, 5, next_token=3)
    pool.add(one, 0, rows)
    path = tmp_path / "e3d-r-a-0.safetensors"
    settled(path.exists)
    meta, tensors = read_dump(path)
    assert (meta.tokens, meta.next_token) == (6, 3)
    assert torch.equal(tensors[AUX], rows.aux_t)
    assert torch.equal(tensors[LAST], rows.last_t)
    assert tensors[IDS].tolist() == list(one.ids)
    assert (len(calls) == 1) == (most == 1 << 20)


def test_one_bad_chunk_marks_the_whole_dump(make_pool: MakePool, tmp_path: Path) -> None:
    pool, one = make_pool(), dump("a", 4)
    pool.add(one, 0, Rows(2, finite=False))
    pool.add(one, 2, Rows(2))
    settled((tmp_path / "e3d-r-a-0.safetensors").exists)
    assert read_dump(tmp_path / "e3d-r-a-0.safetensors")[0].finite is False


def error_of(tmp_path: Path, name: str) -> DumpError:
    path = tmp_path / f"e3d-r-{name}-0.error.json"
    settled(path.exists)
    assert path.stat().st_mode & 0o777 == 0o660
    return DumpError.from_json(path.read_text())


@pytest.mark.parametrize(
    ("call", "chunks"),
    [("posix_fallocate", 2), ("pwritev", 2), ("rename", 2), ("pwritev", 1), ("rename", 1), ("fchmod", 1)],
)
def test_a_full_disk_is_an_error_record_and_the_next_prompt_works(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, chunks: int
) -> None:
    pool, real, failed = make_pool(), getattr(os, call), []

    def full_once(*args: Any) -> Any:
        if not failed:
            failed.append(args)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, call, full_once)
    first, rows = dump("a", 4), [Rows(4 // chunks) for _ in range(chunks)]
    for place, part in enumerate(rows):
        pool.add(first, place * 2, part)
    record = error_of(tmp_path, "a")
    assert (record.reason, record.instance) == ("disk", "test")
    assert "No space left" in record.detail
    settled(lambda: all(part.released for part in rows))
    pool.add(dump("b", 2), 0, Rows(2))
    settled((tmp_path / "e3d-r-b-0.safetensors").exists)
    assert names(tmp_path) == ["e3d-r-a-0.error.json", "e3d-r-b-0.safetensors"]
    assert pool.failed == 1


def test_a_dump_takes_the_place_of_an_earlier_error_record(make_pool: MakePool, tmp_path: Path) -> None:
    pool, first = make_pool(), dump("a", 2)
    pool.fail(first, "aborted", "the request was aborted")
    error_of(tmp_path, "a")
    pool.add(dump("a", 2), 0, Rows(2))
    settled((tmp_path / "e3d-r-a-0.safetensors").exists)
    settled(lambda: not (tmp_path / "e3d-r-a-0.error.json").exists())
    assert names(tmp_path) == ["e3d-r-a-0.safetensors"]


def test_a_spool_that_takes_nothing_does_not_stop_the_writers(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, real = make_pool(), os.open

    def refuse(path: Any, *args: Any, **named: Any) -> int:
        if str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, *args, **named)

    monkeypatch.setattr(os, "open", refuse)
    pool.add(dump("a", 2), 0, Rows(2))
    settled(lambda: pool.failed)
    monkeypatch.undo()
    pool.add(dump("b", 2), 0, Rows(2))
    settled((tmp_path / "e3d-r-b-0.safetensors").exists)


def test_a_spool_that_is_gone_and_comes_back(make_pool: MakePool, tmp_path: Path) -> None:
    pool, away = make_pool(), tmp_path.with_name("away")
    tmp_path.rename(away)
    for name in "abcde":  # more than there are writers
        pool.add(dump(name, 2), 0, Rows(2))
    settled(lambda: pool.failed == 5)
    away.rename(tmp_path)
    pool.add(dump("f", 2), 0, Rows(2))
    settled((tmp_path / "e3d-r-f-0.safetensors").exists)


def test_a_failed_prompt_drops_what_it_has_and_what_still_comes(make_pool: MakePool, tmp_path: Path) -> None:
    pool, one, early, late = make_pool(), dump("a", 6), Rows(2), Rows(2)
    pool.add(one, 0, early)
    settled(lambda: early.released)
    pool.fail(one, "pinned_full", "no room")
    pool.fail(one, "internal", "a second reason")
    assert error_of(tmp_path, "a").reason == "pinned_full"
    pool.add(one, 2, late)
    assert late.released == 1
    assert names(tmp_path) == ["e3d-r-a-0.error.json"]


def test_a_restarted_prompt_leaves_one_right_dump(make_pool: MakePool, tmp_path: Path) -> None:
    pool, first, second = make_pool(), dump("a", 4), dump("a", 4)
    pool.add(first, 0, Rows(2, 1))
    pool.abandon(first)
    whole = Rows(4, 2)
    pool.add(second, 0, whole)
    settled((tmp_path / "e3d-r-a-0.safetensors").exists)
    settled(lambda: names(tmp_path) == ["e3d-r-a-0.safetensors"])
    assert torch.equal(read_dump(tmp_path / "e3d-r-a-0.safetensors")[1][AUX], whole.aux_t)
    assert pool.failed == 0


def test_above_the_high_water_mark_only_begun_dumps_go_on(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(high_water_bytes=20 * ROW)
    begun = dump("begun", 4)
    pool.add(begun, 0, Rows(2))
    settled(lambda: any(name.endswith(".tmp") for name in names(tmp_path)))
    ballast = tmp_path / "e3d-r-old-0.safetensors"
    ballast.write_bytes(b"x" * (30 * ROW))
    time.sleep(2 * pool_module.LOOK_S)
    waiting, lost = Rows(2), Rows(2)
    failing = dump("failing", 4)
    pool.add(dump("new", 2), 0, waiting)
    pool.add(failing, 0, lost)
    pool.add(begun, 2, Rows(2))
    settled((tmp_path / "e3d-r-begun-0.safetensors").exists)
    pool.fail(failing, "pinned_full", "no room")  # its memory must come back although it waits
    settled(lambda: lost.released)
    assert not (tmp_path / "e3d-r-new-0.safetensors").exists()
    assert waiting.released == 0
    ballast.unlink()
    settled((tmp_path / "e3d-r-new-0.safetensors").exists)


def test_leftovers_of_a_killed_server_age_out(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (".e3d-r-a-0.1-1.tmp", ".e3d-r-b-0.1-1.tmp", ".notes.tmp"))
    for path in (old, new, other):
        path.write_text("x")
    for path in (old, other):
        os.utime(path, (1, 1))
    remove_stale(tmp_path, 60.0, 3600.0)
    assert names(tmp_path) == sorted([new.name, other.name])


def test_error_record_is_what_clients_read(make_pool: MakePool, tmp_path: Path) -> None:
    make_pool().fail(dump("a", 2), "rows", 'a "quoted" reason')
    record = error_of(tmp_path, "a")
    assert json.loads(record.to_json()) == {
        "rid": "e3d-r-a-0",
        "reason": "rows",
        "detail": 'a "quoted" reason',
        "instance": "test",
    }


def test_dumps_of_a_killed_remote_client_age_out(tmp_path: Path) -> None:
    """Nobody else sees that spool: what nobody took is removed by the server itself, what is fresh or foreign stays."""
    now = time.time()
    ages = {
        "e3d-r-old-0.safetensors": 7200,
        "e3d-r-old-1.error.json": 7200,
        "e3d-r-new-0.safetensors": 10,
        "someone.safetensors": 7200,
        "eagle3.json": 7200,
    }
    for name, age in ages.items():
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (now - age, now - age))
    remove_stale(tmp_path, 60.0, 3600.0)
    assert {path.name for path in tmp_path.iterdir()} == {
        "e3d-r-new-0.safetensors",
        "someone.safetensors",
        "eagle3.json",
    }
