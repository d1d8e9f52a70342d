"""`import` of state files that change between two runs, or that were first read with another target."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file

from eagle3_data.builders.foreign.run import ImportConfig, ImportReport, import_states
from eagle3_data.builders.foreign.source import Source
from eagle3_data.builders.foreign.specforge import SpecForgeFiles
from eagle3_data.builders.foreign.speculators import SpeculatorsFiles
from eagle3_data.errors import DumpMismatch, ManifestMismatch
from eagle3_data.protocol import AUX, IDS, MASK
from eagle3_data.shards import ShardSet
from eagle3_data.verify import verify

TOKENS, WIDTH, VOCAB, FILES = 20, 64, 768, 6


class Stop(Exception):
    """The import is killed."""


def put(folder: Path, i: int, seed: int, *, highest: int = 700) -> dict[str, torch.Tensor]:
    """A SpecForge file; equal seeds give equal contents."""
    generator = torch.Generator().manual_seed(seed)
    data = {
        "input_ids": torch.randint(highest, (TOKENS,), generator=generator),
        "loss_mask": torch.ones(TOKENS, dtype=torch.int64),
        "aux_hidden_state": torch.randn(1, TOKENS, 3 * WIDTH, generator=generator).bfloat16(),
        "hidden_state": torch.randn(1, TOKENS, WIDTH, generator=generator).bfloat16(),
    }
    folder.mkdir(exist_ok=True)
    torch.save(data, folder / f"data_{i}.ckpt")
    return data


def run(source: Source, out: Path, *, stop_after: int | None = None, **changes: Any) -> ImportReport:
    fields: dict[str, Any] = {"width": WIDTH, "vocab_size": VOCAB, **changes}
    config = ImportConfig(out=out, model="tiny", layers=(1, 3, 4), context_length=4096, shard_bytes=30_000, **fields)

    def on_sample(done: int, total: int) -> None:
        if done == stop_after:
            raise Stop

    return import_states(config, source, on_text=lambda text: None, on_sample=on_sample)


def stopped(source: Source, out: Path) -> None:
    with pytest.raises(Stop):
        run(source, out, stop_after=3)


def test_files_written_anew_under_the_same_names_are_refused(tmp_path: Path) -> None:
    cache, out = tmp_path / "cache", tmp_path / "out"
    for i in range(FILES):
        put(cache, i, i)
    times = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    stopped(SpecForgeFiles(cache), out)
    for i in range(FILES):  # other conversations of the same lengths
        put(cache, i, 100 + i)
    with pytest.raises(ManifestMismatch, match=r"data_0\.ckpt was written anew .*6 of 6 files differ"):
        run(SpecForgeFiles(cache), out)
    old = [put(cache, i, i) for i in range(FILES)]
    put(cache, FILES, 7)
    for path, time in times.items():
        os.utime(path, ns=(time, time))
    with pytest.raises(ManifestMismatch, match=r"data_6\.ckpt is new"):
        run(SpecForgeFiles(cache), out)
    (cache / f"data_{FILES}.ckpt").unlink()
    assert run(SpecForgeFiles(cache), out).saved == FILES
    assert verify(out).problems == []
    data = ShardSet.open(out)
    for i, wanted in enumerate(old):
        assert torch.equal(data.read(i)[IDS].long(), wanted["input_ids"])
        assert torch.equal(data.read(i)[AUX], wanted["aux_hidden_state"][0])


@pytest.mark.parametrize("name", ["input_ids", "loss_mask"])
def test_a_file_that_changes_under_the_import_is_never_stored_under_old_ids(tmp_path: Path, name: str) -> None:
    """Size and time are as before; what was read first is what the file must still hold."""
    cache = tmp_path / "cache"
    for i in range(FILES):
        put(cache, i, i)
    files = SpecForgeFiles(cache)
    real, path = files.states, cache / "data_4.ckpt"

    def states(i: int) -> Any:
        if i == 4:
            data, stat = torch.load(path, weights_only=True), path.stat()
            data[name][3] = 0 if name == "loss_mask" else (data[name][3] + 1) % 700
            torch.save(data, path)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return real(i)

    files.states = states  # type: ignore[method-assign]
    report = run(files, tmp_path / "out")
    assert (report.saved, report.failed) == (FILES - 1, {DumpMismatch.reason: 1})
    assert verify(tmp_path / "out").problems == []
    what = "loss mask is" if name == "loss_mask" else "ids are"
    assert f"data_4.ckpt: its {what} not what was read first" in (tmp_path / "out/failures.jsonl").read_text()


def put_speculators(folder: Path, seed: int) -> list[torch.Tensor]:
    """Arrow rows and hs_*.safetensors that agree with each other; the ids of all rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(700, (TOKENS,), generator=generator) for _ in range(FILES)]
    rows = [{"input_ids": one.tolist(), "loss_mask": [1] * TOKENS} for one in ids]
    Dataset.from_list(rows).save_to_disk(str(folder))
    (folder / "hidden_states").mkdir(exist_ok=True)
    for i, one in enumerate(ids):
        hidden = torch.randn(TOKENS, 4, WIDTH, generator=generator).bfloat16()
        save_file({"hidden_states": hidden, "token_ids": one}, folder / "hidden_states" / f"hs_{i}.safetensors")
    return ids


def test_speculators_files_and_rows_that_changed_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, out = tmp_path / "cache", tmp_path / "out"
    old = put_speculators(cache, 1)
    stopped(SpeculatorsFiles(cache, lambda x: x), out)
    other = put_speculators(cache, 2)
    files = SpeculatorsFiles(cache, lambda x: x)
    with pytest.raises(ManifestMismatch, match="was written anew"):
        run(files, out)
    # and where times tell nothing, the ids do: none of the new states goes under an old id
    monkeypatch.setattr("eagle3_data.builders.foreign.run.stamps_of", lambda source: {})
    fresh = tmp_path / "fresh"
    put_speculators(cache, 1)
    stopped(SpeculatorsFiles(cache, lambda x: x), fresh)
    put_speculators(cache, 2)
    report = run(SpeculatorsFiles(cache, lambda x: x), fresh, max_failure_share=1.0)
    assert (report.saved, report.failed) == (3, {"mismatch": 3})
    data = ShardSet.open(fresh)
    assert [data.read(i)[IDS].tolist() for i in range(3)] == [one.tolist() for one in old[:3]]
    assert not any(torch.equal(a, b) for a, b in zip(old, other, strict=True))
    assert all(bool(data.read(i)[MASK].all()) for i in range(3))


def test_the_right_target_after_a_wrong_one_takes_every_file(tmp_path: Path) -> None:
    """A smaller vocabulary leaves files out; what it left out is read again with the right one."""
    cache, out = tmp_path / "cache", tmp_path / "out"
    for i in range(FILES):
        put(cache, i, i, highest=100 if i < 2 else 700)
    with pytest.raises(DumpMismatch, match=r"data_0\.ckpt: aux states are 192 wide.*"):
        run(SpecForgeFiles(cache), out, width=32, vocab_size=128)
    report = run(SpecForgeFiles(cache), out)
    assert (report.saved, report.skipped) == (FILES, {})
    assert verify(out).problems == []
