"""Hybrid mode: what training needs and the shards lack is captured now, once, and stays in the build."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from eagle3_data.builders.pool import FlowConfig
from eagle3_data.builders.settings import BuildConfig
from eagle3_data.builders.stored import recall, remember
from eagle3_data.capture import Encoding
from eagle3_data.cli.train import open_samples
from eagle3_data.errors import BuildFailed
from eagle3_data.manifest import Manifest
from eagle3_data.protocol import AUX, IDS, LAST
from eagle3_data.shards import ShardSet
from eagle3_data.train.trainer import Trainer
from eagle3_data.verify import verify
from tests.builders.conftest import write_samples
from tests.models import VOCAB
from tests.replay import SPEC, Faults, ReplayServer, states
from tests.train.conftest import MakeConfig

COUNT = 24


def unfinished_build(folder: Path, model: Path, *, count: int = COUNT, server_timeout_s: float = 20.0) -> Path:
    """A build that was set up and has not captured anything."""
    samples = write_samples(folder / "s.jsonl", count, lengths=(6, 60))
    flow = FlowConfig(
        max_inflight=2, request_timeout_s=20.0, dump_timeout_s=10.0, server_timeout_s=server_timeout_s, retries=0
    )
    remember(
        BuildConfig(
            out=folder / "data",
            inputs=(str(samples),),
            model=str(model),
            servers=("http://nowhere",),
            shard_bytes=128 << 10,
            flow=flow,
        )
    )
    return folder / "data"


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    return unfinished_build(tmp_path, tiny_llama)


def server(tiny_llama: Path, tmp_path: Path, faults: Faults | None = None) -> ReplayServer:
    return ReplayServer(tmp_path / "spool", replace(SPEC, model=str(tiny_llama), vocab_size=VOCAB, width=64), faults)


def test_training_on_an_unfinished_build_finishes_it(
    folder: Path, tiny_llama: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    settings = make_config("optim.epochs=1", "run.checkpoint_every_steps=1")
    with server(tiny_llama, tmp_path) as running:
        with open_samples(folder, (running.url,)) as samples:
            first = Trainer(make_config("optim.epochs=1", "optim.max_steps=2"), samples).run()
        assert first.state.step == 2
        with open_samples(folder, (running.url,)) as samples:
            last = Trainer(settings, samples).run()  # goes on at step 3, though the shards have grown
            for i in range(len(samples)):
                samples.read(i)
        sent = len(running.requests)
    assert last.state.world_sizes == [1, 1]
    assert last.state.epoch == 1
    assert sent == COUNT  # none twice
    report = verify(folder)
    assert report.ok, report.problems
    shards = ShardSet.open(folder)
    assert len(shards) == COUNT
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        read = shards.read(i)
        aux, final = states(row["input_ids"], running.spec)
        assert read[IDS].tolist() == row["input_ids"]
        assert (read[AUX].numpy().tobytes(), read[LAST].numpy().tobytes()) == (aux, final)


@pytest.mark.parametrize("encoding", ["bf16-planes", "fp8"])
def test_encoded_samples_of_an_open_shard_are_decoded(
    folder: Path, tiny_llama: Path, tmp_path: Path, encoding: Encoding
) -> None:
    """Compressed planes are shorter than the slot that they lie in until the seal."""
    spec = replace(SPEC, model=str(tiny_llama), vocab_size=VOCAB, width=64, dtype="bfloat16")
    remember(replace(recall(folder), encoding=encoding))
    with ReplayServer(tmp_path / "spool", spec) as running, open_samples(folder, (running.url,)) as samples:
        for i in (17, 3):
            read = samples.read(i)
            assert not list((folder / "data").glob("train-*.tar"))  # nothing is sealed yet
            aux, last = (
                torch.frombuffer(bytearray(data), dtype=torch.bfloat16) for data in states(read[IDS].tolist(), spec)
            )
            if encoding == "bf16-planes":
                assert torch.equal(read[AUX].flatten(), aux)
                assert torch.equal(read[LAST].flatten(), last)
            torch.testing.assert_close(read[AUX].flatten(), aux, rtol=0.07, atol=0.01)
            torch.testing.assert_close(read[LAST].flatten(), last, rtol=0.07, atol=0.01)


def test_what_is_needed_first_is_captured_first(folder: Path, tiny_llama: Path, tmp_path: Path) -> None:
    with server(tiny_llama, tmp_path) as running, open_samples(folder, (running.url,)) as samples:
        read = samples.read(17)  # nothing was expected yet: this one alone is captured
        assert [rid.split("-")[2] for rid in running.requests] == ["00000017"]
        assert read[AUX].shape == (int(samples.tokens[17]), 192)
        samples.expect([9, 3])
        samples.read(3)
        samples.read(9)
        assert {rid.split("-")[2] for rid in running.requests[1:3]} == {"00000009", "00000003"}


def test_a_sample_that_cannot_be_captured_trains_nothing_and_is_counted(
    folder: Path, tiny_llama: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    running = server(tiny_llama, tmp_path, Faults(dump={4: "nan"}))
    with running, open_samples(folder, (running.url,)) as samples:
        state = Trainer(make_config("optim.epochs=1"), samples).run().state
        empty = [i for i in range(COUNT) if not samples.read(i)["loss_mask"].any()]
    assert len(empty) == 1
    assert state.skipped_steps == 0
    manifest = Manifest.load(folder)
    assert (manifest.failed, manifest.saved, manifest.state) == ({"non_finite": 1}, COUNT - 1, "complete")


def test_a_shard_that_is_sealed_while_the_reader_looks_is_found(
    folder: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder knows of a shard before the manifest on disk does; a reader that looked then never looked again."""
    save = Manifest.save
    with server(tiny_llama, tmp_path) as running, open_samples(folder, (running.url,)) as samples:

        def look_and_save(manifest: Manifest, out: Path) -> None:
            samples._refresh()  # type: ignore[attr-defined]
            save(manifest, out)

        monkeypatch.setattr(Manifest, "save", look_and_save)
        samples.expect(range(COUNT))
        for i in range(COUNT):
            assert samples.read(i)[AUX].any()


def test_too_many_failures_end_the_training(
    folder: Path, tiny_llama: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    faults = Faults(dump=dict.fromkeys(range(COUNT), "nan"))
    with (
        server(tiny_llama, tmp_path, faults) as running,
        pytest.raises(BuildFailed, match="samples failed"),
        open_samples(folder, (running.url,)) as samples,
    ):
        Trainer(make_config("optim.epochs=1"), samples).run()


def test_each_index_part_is_read_once(
    folder: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a seal costs does not grow with the shards that were sealed before it."""
    reads: list[str] = []
    real = pq.read_table

    def read_table(path: Path, **options: Any) -> pa.Table:
        reads.append(Path(path).name)
        return real(path, **options)

    remember(replace(recall(folder), shard_bytes=16 << 10))
    with server(tiny_llama, tmp_path) as running, open_samples(folder, (running.url,)) as samples:
        monkeypatch.setattr(pq, "read_table", read_table)
        samples.expect(range(len(samples)))
        for i in range(len(samples)):
            samples.read(i)  # as it comes, so that seals and reads alternate
        samples.close()
        for i in range(len(samples)):
            samples.read(i)
    shards = len(Manifest.load(folder).shards)
    assert shards >= COUNT // 2
    assert len(reads) <= 2 * shards  # a part by the reader, and once more when the index becomes one file
