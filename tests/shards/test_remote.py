"""Mirrors: ranges into given memory, broken connections go on at the same byte, a bounded cache that may be killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3_data.errors import ConfigError, DatasetUnavailable, ShardCorrupt
from eagle3_data.patience import Patience
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from eagle3_data.shards import RemoteShardSet, ShardSet, open_samples
from eagle3_data.shards.ahead import ReadAhead
from eagle3_data.shards.cache import CacheConfig, ShardCache, choose_cache
from eagle3_data.shards.fetch import Fetcher
from eagle3_data.shards.sources import Access, mirror_url
from tests.builds import SPEC, FakeDump, make_build
from tests.webserver import Fault, FolderServer

FAST = Patience(first_s=0.0, longest_s=0.0, total_s=60.0)
BRIEF = Patience(first_s=0.01, longest_s=0.01, total_s=0.1)
LENGTHS = (5, 64, 3, 100, 17, 8)


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[FolderServer, list[FakeDump]]]:
    dumps = make_build(tmp_path / "b", LENGTHS)
    with FolderServer(tmp_path / "b") as server:
        yield server, dumps


def same(sample: dict[str, torch.Tensor], dump: FakeDump) -> bool:
    wanted = {AUX: dump.aux, LAST: dump.last, IDS: dump.ids, MASK: dump.mask}
    return all(
        torch.equal(tensor, wanted[name]) and tensor.dtype == wanted[name].dtype for name, tensor in sample.items()
    )


@pytest.mark.parametrize("url", ["http", "file"])
def test_mirror_gives_the_same_samples(mirror: tuple[FolderServer, list[FakeDump]], url: str) -> None:
    server, dumps = mirror
    data = open_samples(server.url if url == "http" else f"file://{server.folder}")
    assert isinstance(data, RemoteShardSet)
    for i, dump in enumerate(dumps):
        assert same(data.read(i), dump)
        assert same(data.read(i, (LAST, MASK)), dump)
    assert same(pickle.loads(pickle.dumps(data)).read(3), dumps[3])


def test_columns_take_only_their_bytes(mirror: tuple[FolderServer, list[FakeDump]]) -> None:
    """Ids without states: nothing but headers and ids is asked for."""
    server, dumps = mirror
    data = RemoteShardSet.open(server.url)
    server.asked.clear()
    received = data.fetcher.bytes_received
    for i, dump in enumerate(dumps):
        assert same(data.read(i, (IDS, MASK)), dump)
    assert data.fetcher.bytes_received - received == sum(512 + 5 * n for n in LENGTHS)
    spans = [(asked.path, asked.start, asked.end) for asked in server.asked]
    for i, n in enumerate(LENGTHS):
        low = int(data.offsets[i]) + 512
        states = (f"/data/{data.shard_of(i)}", low, low + n * SPEC.state_bytes_per_token)
        assert not [s for s in spans if s[0] == states[0] and s[1] < states[2] and states[1] < (s[2] or 1 << 60)]


@pytest.mark.parametrize("reset", [False, True], ids=["cut", "reset"])
def test_broken_connection_goes_on_at_the_same_byte(mirror: tuple[FolderServer, list[FakeDump]], reset: bool) -> None:
    """Each range breaks off twice. After a cut, the next request starts exactly where the bytes ended."""
    server, dumps = mirror
    data = RemoteShardSet.open(server.url, patience=FAST)
    server.asked.clear()
    server.fault = lambda asked, number: (
        Fault(cut=(asked.end or 0) // 7 % 3000 + 1, reset=reset) if number % 3 else None
    )
    begun = server.sent
    for i, dump in enumerate(dumps):
        assert same(data.read(i), dump)
    if not reset:  # a reset may destroy bytes that were sent and not yet read
        assert server.sent - begun == int(data.nbytes.sum())
        for before, after in zip(server.asked, server.asked[1:], strict=False):
            if after.end == before.end and after.path == before.path:
                assert before.start < after.start
    assert len(server.asked) > len(dumps)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_passing_refusals_are_tried_again(mirror: tuple[FolderServer, list[FakeDump]], status: int) -> None:
    server, dumps = mirror
    data = RemoteShardSet.open(server.url, patience=FAST)
    server.fault = lambda asked, number: Fault(status=status) if number % 4 else None
    assert same(data.read(3), dumps[3])


def test_retry_after_is_obeyed(mirror: tuple[FolderServer, list[FakeDump]], monkeypatch: pytest.MonkeyPatch) -> None:
    server, dumps = mirror
    waits: list[float] = []
    monkeypatch.setattr("eagle3_data.patience.time.sleep", waits.append)
    data = RemoteShardSet.open(server.url, patience=FAST)
    told = {len(server.asked) + 1: "7", len(server.asked) + 2: "Wed, 21 Oct 2015 07:28:00 GMT"}
    server.fault = lambda asked, number: Fault(429, {"Retry-After": told[number]}) if number in told else None
    assert same(data.read(1), dumps[1])
    assert waits == [7.0, 0.0]
    server.fault = lambda asked, number: Fault(429, {"Retry-After": "86400"})
    with pytest.raises(DatasetUnavailable, match="429"):  # a day is a refusal
        data.read(1)
    assert waits == [7.0, 0.0]


def test_lasting_refusals_say_what_to_do(mirror: tuple[FolderServer, list[FakeDump]]) -> None:
    server, _ = mirror
    data = RemoteShardSet.open(server.url, patience=BRIEF)
    for status, word in ((401, "token"), (403, "token"), (404, "check the name"), (503, "tries in a row")):
        server.fault = lambda asked, number, status=status: Fault(status=status)  # type: ignore[misc]
        count = len(server.asked)
        with pytest.raises(DatasetUnavailable, match=word):
            data.read(0)
        assert len(server.asked) - count == 1 or (status == 503 and len(server.asked) - count > 1)
    with pytest.raises(DatasetUnavailable, match="neither a build folder nor a mirror"):
        open_samples("no-such-folder")


def test_short_shard_and_server_without_ranges(tmp_path: Path) -> None:
    make_build(tmp_path / "b", LENGTHS)
    with FolderServer(tmp_path / "b") as server:
        data = RemoteShardSet.open(server.url, patience=FAST)
        os.truncate(tmp_path / "b" / "data" / "train-000001.tar", 1000)
        with pytest.raises(ShardCorrupt, match=r"train-000001\.tar, sample 00000002.*ends before"):
            data.read(2)
    with FolderServer(tmp_path / "b", ranges=False) as server:
        data = RemoteShardSet.open(server.url, patience=FAST)
        with pytest.raises(DatasetUnavailable, match="ignores byte ranges"):
            data.read(1)


def test_token_stays_with_its_host(
    mirror: tuple[FolderServer, list[FakeDump]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub redirects to its store by a signed link: the token must not travel, and the link must not be shown."""
    store, dumps = mirror
    commit = "0123456789abcdef0123456789abcdef01234567"
    with FolderServer(store.folder) as hub:
        prefix = "/datasets/org/name/resolve/main/"
        hub.redirect = lambda path: f"{store.url}/{path.removeprefix(prefix)}?Signature=SECRET"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        data = RemoteShardSet.open("org/name", access=Access("hf_test"), patience=FAST)
        assert all(same(data.read(i), dump) for i, dump in enumerate(dumps))
        ours = [asked for asked in hub.asked if asked.path.startswith("/datasets/")]  # the client asks more, without
        assert {asked.token for asked in ours} == {"Bearer hf_test"}
        assert {asked.token for asked in store.asked} == {None}
        assert len([a for a in hub.asked if a.path.endswith("train-000000.tar")]) == 1  # the link is used again
        brief = RemoteShardSet.open("org/name", access=Access("hf_test"), patience=BRIEF)
        store.fault = lambda asked, number: Fault(status=503)
        with pytest.raises(DatasetUnavailable) as caught:
            brief.read(0)
        assert "SECRET" not in str(caught.value)
        assert "hf_test" not in str(caught.value)
        assert "hf_test" not in repr(Access("hf_test"))
        hub.redirect = lambda path: "file:///etc/passwd"
        with pytest.raises(DatasetUnavailable, match="not HTTP"):
            RemoteShardSet.open("org/name", patience=FAST)
    assert mirror_url("org/name", "v1") == "hf://datasets/org/name@v1"
    assert mirror_url("hf://datasets/org/name/sub", commit) == f"hf://datasets/org/name@{commit}/sub"
    with pytest.raises(ConfigError, match="no revisions"):
        mirror_url("https://host/x", "v1")


def test_expired_link_is_asked_for_again(
    mirror: tuple[FolderServer, list[FakeDump]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, dumps = mirror
    with FolderServer(store.folder) as hub:
        turn = [0]
        prefix = "/datasets/org/name/resolve/main/"
        hub.redirect = lambda path: f"{store.url}/{path.removeprefix(prefix)}?turn={turn[0]}"
        store.fault = lambda asked, _: None if asked.path.endswith(f"turn={turn[0]}") else Fault(status=403)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        data = RemoteShardSet.open("org/name", patience=FAST)
        for i, dump in enumerate(dumps):
            assert same(data.read(i), dump)
            turn[0] += 1


def test_read_into_given_memory(mirror: tuple[FolderServer, list[FakeDump]]) -> None:
    """Local and remote, whole and only the first rows; what does not fit is refused before anything is read."""
    server, dumps = mirror
    for data in (ShardSet.open(server.folder), RemoteShardSet.open(server.url)):
        for i, dump in enumerate(dumps):
            rows = dump.tokens - 1 if dump.tokens > 3 else dump.tokens
            out = {AUX: torch.empty_like(dump.aux[:rows]), MASK: torch.empty_like(dump.mask)}
            data.read_into(i, out)
            assert torch.equal(out[AUX], dump.aux[:rows])
            assert torch.equal(out[MASK], dump.mask)
        for wrong in (
            torch.empty(6, 192),
            torch.empty(2, 64, dtype=torch.bfloat16),
            torch.empty(5, 384, dtype=torch.bfloat16)[:, ::2],
        ):
            with pytest.raises(ConfigError, match="does not go into"):
                data.read_into(0, {AUX: wrong})


# ------------------------------------------------------------- ahead


def test_read_ahead_fetches_each_sample_once(mirror: tuple[FolderServer, list[FakeDump]]) -> None:
    server, dumps = mirror
    data = RemoteShardSet.open(server.url)
    begun = data.fetcher.bytes_received
    ahead = ReadAhead(data)
    for row, dump in enumerate(dumps):
        sample = {name: ahead.take(row, name) for name in (AUX, LAST, IDS, MASK)}
        assert same(sample, dump)
        ahead.expect(range(row + 1, min(row + 3, len(dumps))))
    ahead.close()
    # the first sample teaches the columns (each has its own range, one header); all others are one range each
    assert data.fetcher.bytes_received - begun == int(data.nbytes.sum())
    assert ahead.wasted == 0


def test_read_ahead_stops_where_it_is_useless(mirror: tuple[FolderServer, list[FakeDump]]) -> None:
    """A loop in another order than announced (a shuffle buffer) is right, and soon reads nothing for nothing."""
    server, dumps = mirror
    data = RemoteShardSet.open(server.url)
    ahead = ReadAhead(data)
    for turn in range(60):
        row = turn * 5 % 6
        assert same({AUX: ahead.take(row, AUX)}, dumps[row])
        ahead.expect([(row + 2) % 6])
    assert 0 < ahead.wasted <= 9
    ahead.close()


# ------------------------------------------------------------- cache


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name.endswith(".tar")}


def test_cache_keeps_all_when_all_fits(mirror: tuple[FolderServer, list[FakeDump]], tmp_path: Path) -> None:
    server, dumps = mirror
    config = CacheConfig(tmp_path / "c", 1 << 30)
    data = RemoteShardSet.open(server.url, cache=config)
    for _ in range(2):
        assert all(same(data.read(i), dump) for i, dump in enumerate(dumps))
    shards = [asked for asked in server.asked if asked.path.startswith("/data/")]
    assert len(shards) == 3
    assert sum(sizes(tmp_path / "c").values()) == data.manifest.nbytes
    server.asked.clear()
    again = RemoteShardSet.open(server.url, cache=config)
    assert all(same(again.read(i), dump) for i, dump in enumerate(dumps))
    assert not [asked for asked in server.asked if asked.path.startswith("/data/")]


def test_cache_is_bounded_and_drops_the_oldest_use(mirror: tuple[FolderServer, list[FakeDump]], tmp_path: Path) -> None:
    server, dumps = mirror
    plain = RemoteShardSet.open(server.url)
    rows = plain.manifest.shards
    limit = rows[0].nbytes + rows[1].nbytes
    data = RemoteShardSet.open(server.url, cache=CacheConfig(tmp_path / "c", limit))
    cache = data.cache
    assert cache is not None
    assert cache.get(rows[0], data.fetcher)
    assert cache.get(rows[1], data.fetcher)
    assert not cache.get(rows[2], data.fetcher), "both are in use"
    os.utime(cache.path(rows[1]), (1_000_000_000, 1_000_000_000))
    assert not cache.get(rows[2], data.fetcher, keep=frozenset({rows[1].xxh3}))
    os.utime(cache.path(rows[0]), (1_100_000_000, 1_100_000_000))
    assert cache.get(rows[2], data.fetcher)
    assert sum(sizes(tmp_path / "c").values()) <= limit
    assert cache.path(rows[0]).exists()
    assert not cache.path(rows[1]).exists()
    # what is not cached is read by ranges, and does not push anything out
    assert all(same(data.read(i), dump) for i, dump in enumerate(dumps))
    assert cache.path(rows[0]).exists()
    with pytest.raises(ConfigError, match="below one shard"):
        RemoteShardSet.open(server.url, cache=CacheConfig(tmp_path / "c", 1000))


def test_a_cache_below_the_data_set_keeps_what_fits(
    mirror: tuple[FolderServer, list[FakeDump]], tmp_path: Path
) -> None:
    """Room for two of three shards: two are fetched once, and every later epoch reads them here."""
    server, dumps = mirror
    rows = RemoteShardSet.open(server.url).manifest.shards
    for row in rows:
        limit = sum(shard.nbytes for shard in rows) - row.nbytes
    data = RemoteShardSet.open(server.url, cache=CacheConfig(tmp_path / "c", limit))
    for epoch in range(3):
        server.asked.clear()
        assert all(same(data.read(i), dump) for i, dump in enumerate(dumps))
        whole = [asked for asked in server.asked if asked.path.endswith(".tar") and asked.start == 0]
        assert len(whole) == (2 if epoch == 0 else 0)
        ranges = [asked for asked in server.asked if asked.path.endswith(".tar") and asked.start]
        assert {asked.path for asked in ranges} == {"/data/train-000002.tar"}
    assert sum(sizes(tmp_path / "c").values()) <= limit


def test_another_data_set_takes_the_room_of_idle_shards(
    mirror: tuple[FolderServer, list[FakeDump]], tmp_path: Path
) -> None:
    server, _ = mirror
    dumps = make_build(tmp_path / "other", (7, 60, 4, 90, 11, 9))
    first = RemoteShardSet.open(server.url)
    config = CacheConfig(tmp_path / "c", first.manifest.nbytes)
    first = RemoteShardSet.open(server.url, cache=config)
    for i in range(len(first)):
        first.read(i)
    with FolderServer(tmp_path / "other") as other:
        second = RemoteShardSet.open(other.url, cache=config)
        assert all(same(second.read(i), dump) for i, dump in enumerate(dumps))
        names = {f"{row.xxh3}.tar" for row in first.manifest.shards}
        assert set(sizes(tmp_path / "c")) == names, "shards in use stay"
        for path in (tmp_path / "c").glob("*.tar"):
            os.utime(path, (1_000_000_000, 1_000_000_000))
        second = RemoteShardSet.open(other.url, cache=config)
        assert all(same(second.read(i), dump) for i, dump in enumerate(dumps))
        assert set(sizes(tmp_path / "c")) & {f"{row.xxh3}.tar" for row in second.manifest.shards}
        assert sum(sizes(tmp_path / "c").values()) <= config.limit_bytes


SHARING = """
import sys, time
import eagle3_data.shards.cache as c, eagle3_data.shards.remote as r
c.IDLE_S, c.TOUCH_S, r.FULL_S = 0.0, 0.0, 0.0
import torch
from pathlib import Path
from eagle3_data.shards import RemoteShardSet
url, folder, limit, expected, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
wanted = torch.load(expected, weights_only=True)
print("ready", flush=True)
sys.stdin.readline()
fetched = 0
for turn in range(rounds):
    data = RemoteShardSet.open(url, cache=c.CacheConfig(folder, limit))
    for i in torch.randperm(len(data), generator=torch.Generator().manual_seed(turn)).tolist():
        for name, tensor in data.read(i).items():
            assert torch.equal(tensor, wanted[i][name]), (turn, i, name)
    fetched += len(list(folder.glob("*.tar")))
print("right", fetched, flush=True)
"""


def test_two_processes_and_one_small_cache(tmp_path: Path) -> None:
    """Two data sets, each larger than the cache, evicting each other all the time: right bytes, and never over it."""
    folder, processes = tmp_path / "c", []
    with contextlib.ExitStack() as stack:
        limit = 0
        for number, lengths in enumerate(((50, 64, 33, 100, 17, 80), (70, 60, 44, 90, 31, 99))):
            dumps = make_build(tmp_path / f"b{number}", lengths, per_shard=1)
            wanted = [{AUX: d.aux, LAST: d.last, IDS: d.ids, MASK: d.mask} for d in dumps]
            torch.save(wanted, tmp_path / f"e{number}")
            server = stack.enter_context(FolderServer(tmp_path / f"b{number}"))
            limit = max(limit, 2 * max(p.stat().st_size for p in (tmp_path / f"b{number}/data").glob("*.tar")))
            processes += [
                stack.enter_context(
                    subprocess.Popen(
                        [
                            sys.executable,
                            "-c",
                            SHARING,
                            server.url,
                            str(folder),
                            str(limit),
                            f"{tmp_path}/e{number}",
                            "6",
                        ],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
            ]
        for process in processes:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        most = 0
        while any(process.poll() is None for process in processes):
            most = max(most, taken(folder))
            time.sleep(0.002)  # the two cores are for those who read
        for process in processes:
            assert process.stdout
            assert process.stdout.read().startswith("right ")
            assert process.returncode == 0
    assert 0 < most <= limit
    assert taken(folder) <= limit
    assert not list(folder.glob("*.part"))


def taken(folder: Path) -> int:
    """Bytes of shards there and on their way, at one moment: a walk alone counts what went before others came."""
    if not folder.exists():
        return 0
    with room(folder):
        return sum(path.stat().st_size for path in folder.iterdir() if path.name.endswith((".tar", ".tar.part")))


@contextlib.contextmanager
def room(folder: Path) -> Iterator[None]:
    """The lock under which readers count."""
    with (folder / ".room.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_a_shard_takes_its_name_when_nobody_counts(
    mirror: tuple[FolderServer, list[FakeDump]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk over the folder may see a file that is renamed meanwhile under neither name, and let too much in."""
    data = RemoteShardSet.open(mirror[0].url)
    shard, fetched, counted = data.manifest.shards[0], threading.Event(), threading.Event()
    cache, read_into = ShardCache(CacheConfig(tmp_path / "c", 1 << 30)), Fetcher.read_into

    def count_now(self: Fetcher, path: str, wanted: list[tuple[int, memoryview]]) -> None:
        read_into(self, path, wanted)
        fetched.set()
        assert counted.wait(60)

    monkeypatch.setattr(Fetcher, "read_into", count_now)
    thread = threading.Thread(target=cache.get, args=(shard, data.fetcher))
    thread.start()
    assert fetched.wait(60)
    with room(tmp_path / "c"):
        counted.set()
        thread.join(0.5)
        assert thread.is_alive()
        assert not cache.path(shard).exists()
    thread.join(60)
    assert cache.path(shard).exists()


def test_cache_by_environment_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_build(tmp_path / "b", LENGTHS)
    assert choose_cache(None, None) is None
    monkeypatch.setenv("EAGLE3_DATA_SHARD_CACHE", str(tmp_path / "c"))
    data = open_samples(f"file://{tmp_path / 'b'}")
    data.read(0)
    assert len(sizes(tmp_path / "c")) == 1
    monkeypatch.setenv("EAGLE3_DATA_SHARD_CACHE_SIZE", "3 GiB")
    assert choose_cache(None, None) == CacheConfig(tmp_path / "c", 3 << 30)
    assert choose_cache(tmp_path / "d", "1KB") == CacheConfig(tmp_path / "d", 1000)
    monkeypatch.setenv("EAGLE3_DATA_SHARD_CACHE_SIZE", "much")
    with pytest.raises(ConfigError, match="not a size"):
        choose_cache(None, None)
    monkeypatch.delenv("EAGLE3_DATA_SHARD_CACHE")
    with pytest.raises(ConfigError, match="without its folder"):
        choose_cache(None, "1GB")


def test_damaged_bytes_never_become_a_cached_shard(mirror: tuple[FolderServer, list[FakeDump]], tmp_path: Path) -> None:
    server, _ = mirror
    data = RemoteShardSet.open(server.url, cache=CacheConfig(tmp_path / "c", 1 << 30))
    path = server.folder / "data" / "train-000000.tar"
    damaged = bytearray(path.read_bytes())
    damaged[3000] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ShardCorrupt, match="does not give the manifest's checksum"):
        data.read(0)
    assert sizes(tmp_path / "c") == {}


def test_two_threads_fetch_a_shard_once(mirror: tuple[FolderServer, list[FakeDump]], tmp_path: Path) -> None:
    server, _ = mirror
    plain = RemoteShardSet.open(server.url)
    caches = [ShardCache(CacheConfig(tmp_path / "c", 1 << 30)) for _ in range(4)]
    server.asked.clear()
    threads = [
        threading.Thread(target=cache.get, args=(plain.manifest.shards[1], Fetcher(server.url))) for cache in caches
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.asked) == 1
    assert all(cache.map(plain.manifest.shards[1]) is not None for cache in caches)


KILLED = """
import os, signal, sys
import eagle3_data.shards.cache as c
c.WINDOW_BYTES = 4096
from eagle3_data.shards import RemoteShardSet
from eagle3_data.shards.fetch import Fetcher
from pathlib import Path
url, folder, after = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
data = RemoteShardSet.open(url, cache=c.CacheConfig(folder, 1 << 30))
real, calls = Fetcher.read_into, [0]
def read_into(self, path, ranges):
    calls[0] += 1
    if calls[0] > after:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, path, ranges)
Fetcher.read_into = read_into
data.cache.get(data.manifest.shards[1], data.fetcher)
"""


def test_killed_download_goes_on_where_it_stopped(
    mirror: tuple[FolderServer, list[FakeDump]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, dumps = mirror
    done = subprocess.run([sys.executable, "-c", KILLED, server.url, str(tmp_path / "c"), "5"], check=False)
    assert done.returncode == -9
    assert sizes(tmp_path / "c") == {}
    monkeypatch.setattr("eagle3_data.shards.cache.WINDOW_BYTES", 4096)
    data = RemoteShardSet.open(server.url, cache=CacheConfig(tmp_path / "c", 1 << 30))
    server.asked.clear()
    assert data.cache
    assert data.cache.get(data.manifest.shards[1], data.fetcher)
    assert min(asked.start for asked in server.asked) == 5 * 4096
    assert same(data.read(2), dumps[2])
    # a part that lies about how far it got: found by the checksum, and fetched anew
    (path,) = [p for p in (tmp_path / "c").iterdir() if p.suffix == ".tar"]
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(bytes(path.stat().st_size))
    path.unlink()
    part.with_name(f"{part.name}.done").write_text("8192")
    anew = ShardCache(CacheConfig(tmp_path / "c", 1 << 30))
    assert anew.get(data.manifest.shards[1], data.fetcher)


# ------------------------------------------------------------- a mirror is not trusted


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("offset", -512),
        ("offset", 1 << 40),
        ("nbytes", 1 << 60),
        ("nbytes", 0),
        ("tokens", 0),
        ("shard", "../../x.tar"),
    ],
)
def test_lying_index_is_refused(tmp_path: Path, column: str, value: object) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    make_build(tmp_path / "b", LENGTHS)
    path = tmp_path / "b" / "index" / "train.parquet"
    table = pq.read_table(path)
    values = table.column(column).to_pylist()
    values[2] = value
    place = table.schema.get_field_index(column)
    pq.write_table(
        table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type)), path
    )
    for opened in (str(tmp_path / "b"), f"file://{tmp_path / 'b'}"):
        with pytest.raises(ShardCorrupt):
            open_samples(opened)


def test_manifest_names_no_paths(tmp_path: Path) -> None:
    make_build(tmp_path / "b", LENGTHS)
    path = tmp_path / "b" / "manifest.json"
    text = path.read_text()
    for old, new in (("train-000001.tar", "../../x.tar"), ('"split": "train"', '"split": "../x"')):
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match="not a manifest"):
            open_samples(str(tmp_path / "b"))


def test_states_of_another_width_are_refused(tmp_path: Path) -> None:
    """A member that is whole in itself and not what the manifest says: its tensors never reach a loop."""
    make_build(tmp_path / "b", LENGTHS)
    data = ShardSet.open(tmp_path / "b")
    lie = data.manifest.model_copy(update={"capture": replace(SPEC, layers=(1, 3), width=96).to_dict()})
    lie.save(tmp_path / "b")
    for opened in (str(tmp_path / "b"), f"file://{tmp_path / 'b'}"):
        with pytest.raises(ShardCorrupt, match=r"last_hidden_state is .* the manifest says"):
            open_samples(opened).read(1)
        with pytest.raises(ShardCorrupt):
            open_samples(opened).read_into(1, {LAST: torch.empty(64, 96, dtype=torch.bfloat16)})


def test_garbage_is_no_mirror(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="not a manifest"):
        RemoteShardSet.open(f"file://{tmp_path}")
    make_build(tmp_path / "b", LENGTHS)
    (tmp_path / "b" / "index" / "train.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ShardCorrupt, match="index"):
        RemoteShardSet.open(f"file://{tmp_path / 'b'}")
