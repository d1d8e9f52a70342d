"""Hybrid mode on two ranks: one asks the servers and writes, both train, nobody waits for a server that has died."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_data.builders.build import build
from eagle3_data.builders.finished import FinishedSamples
from eagle3_data.builders.live_ranks import FarSamples, Ranks, note_path, open_live
from eagle3_data.builders.stored import recall, remember
from eagle3_data.errors import BuildFailed
from eagle3_data.manifest import Manifest
from eagle3_data.protocol import AUX, LAST, MASK
from eagle3_data.server.process import free_port
from eagle3_data.shards import ShardSet
from eagle3_data.verify import verify
from tests.models import VOCAB
from tests.replay import SPEC, Faults, ReplayServer
from tests.servers import RunningServer
from tests.train.gloo_worker import Job
from tests.train.test_gloo import assert_same, launch, run
from tests.train.test_live import COUNT, unfinished_build

FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Replay:
    """What a server in a process of its own is to do: the ranks are forked, and threads do not survive that."""

    spool: Path
    model: Path
    port: int
    faults: Faults | None = None
    die_after: int | None = None
    """Requests after which it is gone at once."""

    def main(self, up: Event, end: Event, sent: Any) -> None:
        spec = replace(SPEC, model=str(self.model), vocab_size=VOCAB, width=64)
        server = ReplayServer(self.spool, spec, self.faults)
        server.port = self.port
        with server:
            up.set()
            while not end.wait(0.01):
                if self.die_after is not None and len(server.requests) >= self.die_after:
                    os._exit(1)
            sent.put(len(server.requests))

    @contextmanager
    def running(self) -> Iterator[tuple[str, Callable[[], int]]]:
        """Its URL, and a function that ends it and returns the number of requests it has got."""
        up, end, sent = FORK.Event(), FORK.Event(), FORK.Queue()
        process = FORK.Process(target=self.main, args=(up, end, sent))
        process.start()

        def finish() -> int:
            end.set()
            return int(sent.get(timeout=60))

        try:
            assert up.wait(60)
            yield f"http://127.0.0.1:{self.port}", finish
        finally:
            end.set()
            process.join(10)
            process.kill()


def test_two_ranks_finish_a_build_while_they_train_on_it(tiny_llama: Path, tmp_path: Path) -> None:
    """Sample 4 cannot be captured: it trains nothing on whichever rank it falls to."""
    folder = unfinished_build(tmp_path, tiny_llama)
    replay = Replay(tmp_path / "spool", tiny_llama, free_port(), Faults(dump={4: "nan"}))
    with replay.running() as (url, finish):
        live = run(Job(tmp_path / "live", folder, servers=(url,), epochs=1), 2)
        assert finish() == COUNT  # none asked for twice
    assert len(set(live.steps)) == 1
    manifest = Manifest.load(folder)
    assert (manifest.saved, manifest.failed, manifest.state) == (COUNT - 1, {"non_finite": 1}, "complete")
    assert verify(folder).ok
    assert not note_path(folder).exists()
    assert sorted(live.samples) == sorted(set(live.samples))


def test_two_ranks_train_as_one_on_what_is_captured_meanwhile(tiny_llama: Path, tmp_path: Path) -> None:
    folder = unfinished_build(tmp_path, tiny_llama)
    with Replay(tmp_path / "spool", tiny_llama, free_port()).running() as (url, _):
        live = run(Job(tmp_path / "live", folder, servers=(url,), epochs=2), 2)
    assert_same(live, run(Job(tmp_path / "whole", folder), 1))


def test_a_server_that_dies_ends_all_ranks_and_the_run_goes_on_with_the_next(tiny_llama: Path, tmp_path: Path) -> None:
    folder = unfinished_build(tmp_path, tiny_llama, server_timeout_s=2.0)
    job = Job(tmp_path / "run", folder, epochs=1)
    with Replay(tmp_path / "spool", tiny_llama, free_port(), die_after=9).running() as (url, _):
        ended = launch(replace(job, servers=(url,)), 2)
    assert all(isinstance(answer, str) for answer in ended), ended
    assert all("no server alive" in answer or "another rank could not read" in answer for answer in ended), ended
    assert "no server alive" in "".join(ended)
    with Replay(tmp_path / "spool", tiny_llama, free_port()).running() as (url, finish):
        run(replace(job, servers=(url,)), 2)
        assert finish() <= COUNT - 5  # what was captured before is kept
    assert verify(folder).ok
    assert Manifest.load(folder).saved == COUNT


def test_rank_0_answers_only_who_has_read_the_note(tiny_llama: Path, tmp_path: Path) -> None:
    folder = unfinished_build(tmp_path, tiny_llama)
    spec = replace(SPEC, model=str(tiny_llama), vocab_size=VOCAB, width=64)
    with ReplayServer(tmp_path / "spool", spec) as server:
        config = replace(recall(folder), servers=(server.url,))
        with open_live(config, Ranks(0, 2, "127.0.0.1"), on_text=print) as near:
            far = FarSamples(folder)
            assert (far.fingerprint, far.capture, far.keys) == (near.fingerprint, near.capture, near.keys)
            read = far.read(3)
            for name, tensor in near.read(3).items():
                assert torch.equal(read[name], tensor), name
            note = json.loads(note_path(folder).read_text())
            assert note_path(folder).stat().st_mode & 0o077 == 0
            note_path(folder).write_text(json.dumps({**note, "token": "0" * 32}))
            with pytest.raises(BuildFailed, match="does not answer"):
                far.read(5)
            note_path(folder).write_text(json.dumps(note))
        with pytest.raises(BuildFailed, match="does not answer"):
            far.read(5)


def test_a_rank_that_comes_first_waits_past_the_note_of_an_earlier_run(tiny_llama: Path, tmp_path: Path) -> None:
    folder = unfinished_build(tmp_path, tiny_llama)
    note_path(folder).write_text(json.dumps({"host": "127.0.0.1", "port": free_port(), "token": "0" * 32}))
    spec = replace(SPEC, model=str(tiny_llama), vocab_size=VOCAB, width=64)
    with ThreadPoolExecutor() as pool, ReplayServer(tmp_path / "spool", spec) as server:
        waiting = pool.submit(FarSamples, folder)
        with open_live(replace(recall(folder), servers=(server.url,)), Ranks(0, 2, "127.0.0.1"), on_text=print) as near:
            far = waiting.result(timeout=120)
            out = torch.zeros(3, 192)
            far.read_into(2, {AUX: out})
            assert torch.equal(out, near.read(2)[AUX][:3])


def test_a_run_goes_on_without_servers_once_its_build_is_whole(tiny_llama: Path, tmp_path: Path) -> None:
    """Its samples are numbered by the store; the same command had waited for the servers."""
    folder = unfinished_build(tmp_path, tiny_llama)
    job = Job(tmp_path / "run", folder, epochs=2)
    with Replay(tmp_path / "spool", tiny_llama, free_port()).running() as (url, _):
        begun = run(replace(job, servers=(url,), stop_at=2), 2)
        build(replace(recall(folder), servers=(url,)), on_tick=lambda tick: None, on_text=lambda text: None)
    again = run(replace(job, servers=(url,)), 2)  # nobody listens there any more
    assert (begun.steps, again.steps[0] > 2) == ([2, 2], True)
    straight = run(Job(tmp_path / "straight", folder, epochs=2, servers=(url,)), 1)
    assert straight.samples == begun.samples + again.samples
    for name, tensor in straight.weights.items():
        torch.testing.assert_close(again.weights[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_whole_build_reads_as_it_did_when_it_was_live(tiny_llama: Path, tmp_path: Path) -> None:
    """Sample 4 has no states."""
    folder = unfinished_build(tmp_path, tiny_llama)
    spec = replace(SPEC, model=str(tiny_llama), vocab_size=VOCAB, width=64)
    with ReplayServer(tmp_path / "spool", spec, Faults(dump={4: "nan"})) as server:
        config = replace(recall(folder), servers=(server.url,))
        with open_live(config, Ranks(0, 1, "127.0.0.1"), on_text=print) as live:
            live.expect(range(COUNT))
            before = [live.read(i) for i in range(COUNT)]
    with open_live(config, Ranks(1, 2, "127.0.0.1"), on_text=print) as whole:
        assert isinstance(whole, FinishedSamples)
        assert (whole.fingerprint, whole.keys, whole.capture) == (live.fingerprint, live.keys, live.capture)
        for i, tensors in enumerate(before):
            found = whole.read(i)
            assert found.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(found[name], tensor), (i, name)
            assert torch.equal(whole.read(i, (MASK,))[MASK], tensors[MASK])
        failed = [i for i in range(COUNT) if not before[i][MASK].any()]
        assert [whole.keys[i] for i in failed] == live.failed_keys()


@pytest.mark.server
def test_two_ranks_capture_from_the_real_server_what_a_build_captures(
    llama_server: RunningServer, tmp_path: Path
) -> None:
    """One request at a time on both ways: alone in its prefill a sample's states are the same to the last bit."""
    (tmp_path / "built").mkdir()
    built = unfinished_build(tmp_path / "built", llama_server.model, count=12)
    config = recall(built)
    config = replace(config, servers=(llama_server.url,), flow=replace(config.flow, max_inflight=1))
    build(config, on_tick=lambda tick: None, on_text=lambda text: None)
    live = unfinished_build(tmp_path, llama_server.model, count=12)
    remember(replace(recall(live), flow=config.flow))
    ran = run(Job(tmp_path / "run", live, servers=(llama_server.url,), epochs=1), 2)
    assert len(set(ran.steps)) == 1
    shards = [ShardSet.open(folder) for folder in (built, live)]
    assert shards[0].keys == shards[1].keys
    assert len(shards[0]) == 12
    for i in range(12):
        ours, theirs = (one.read(i) for one in shards)
        assert ours.keys() == theirs.keys() >= {AUX, LAST, MASK}
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), name
    assert verify(live).ok
