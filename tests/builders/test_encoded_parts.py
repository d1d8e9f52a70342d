"""Encodings, parts and mirrors together: what several machines made and pushed is what one would have made."""

from __future__ import annotations

import sys

import pytest
import torch

from eagle3_data.builders.merge import merge
from eagle3_data.cli import main
from eagle3_data.manifest import Manifest
from eagle3_data.shards import ShardSet
from eagle3_data.shards.remote import RemoteShardSet
from eagle3_data.status import read_status
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples
from tests.builders.test_encoded_builds import WAYS, bf16_server

ALL = {**WAYS, "none": {"encoding": "bf16-planes", "last": "none"}}


@pytest.mark.parametrize("way", ALL)
def test_parts_merged_and_pushed_are_one_build(
    builds: Builds, way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, url = write_samples(builds.folder / "s.jsonl", 30), f"file://{builds.folder}/mirror"
    with bf16_server(builds) as server:
        whole = builds.run("whole", samples, server.url, **ALL[way])
        for i in range(3):
            assert builds.run(f"part-{i}", samples, server.url, part=(i, 3), **ALL[way]).complete
    merged = merge([builds.folder / f"part-{i}" for i in range(3)], builds.folder / "out")
    assert builds.shards("out") == builds.shards("whole")
    one = Manifest.load(whole.out)
    assert (merged.capture, merged.fingerprint, merged.content_id) == (one.capture, one.fingerprint, one.content_id)
    assert (merged.plan, merged.nbytes) == (one.plan, one.nbytes)
    assert verify(builds.folder / "out").problems == []
    monkeypatch.setattr(sys, "argv", ["eagle3-data", "push", str(builds.folder / "out"), url])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0, capsys.readouterr()
    pushed = {path.name: path.read_bytes() for path in (builds.folder / "mirror/data").rglob("*.tar")}
    assert pushed == builds.shards("whole")
    monkeypatch.setattr(sys, "argv", ["eagle3-data", "verify", url])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0, capsys.readouterr()
    here, there = ShardSet.open(whole.out), RemoteShardSet.open(url)
    assert here.keys == there.keys
    for i in range(len(here)):
        ours, theirs = here.read(i), there.read(i)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_status_of_a_mirror(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, url = write_samples(builds.folder / "s.jsonl", 20), f"file://{builds.folder}/mirror"
    with bf16_server(builds) as server:
        builds.run("out", samples, server.url, mirror=url)
    status, here = read_status(url), read_status(builds.folder / "out")
    assert (status.state, status.done, status.of, status.nbytes) == ("COMPLETE", 20, 20, here.nbytes)
    assert (status.tokens, status.tokens_of) == (here.tokens, here.tokens_of)
    manifest = Manifest.load(builds.folder / "mirror")
    half = manifest.model_copy(update={"state": "building", "shards": manifest.shards[:1]})
    half.save(builds.folder / "mirror")
    monkeypatch.setattr(sys, "argv", ["eagle3-data", "status", url])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr().out
    assert end.value.code == 0
    assert "PARTIAL" in printed
    assert f"{half.saved} of 20" in printed
    monkeypatch.setattr(sys, "argv", ["eagle3-data", "status", f"file://{builds.folder}/nothing"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert "error:" in capsys.readouterr().err
