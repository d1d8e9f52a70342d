"""`verify --head` and `--against`, command line and all, on states of the real server and through it again."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3_data.capture import CaptureSpec
from eagle3_data.cli import main
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from eagle3_data.shards import ShardSet
from tests.builds import FakeDump, make_build
from tests.server.test_builds import rows_file, run
from tests.servers import RunningServer, prompt

pytestmark = pytest.mark.server


class Taken(FakeDump):
    """A sample of a build, to be sealed again."""

    def __init__(self, data: ShardSet, i: int) -> None:
        sample = data.read(i)
        self.spec, self.tokens = data.capture, len(sample[IDS])
        self.aux, self.last, self.ids, self.mask = (sample[name].clone() for name in (AUX, LAST, IDS, MASK))
        self.next_token = int(data.index["next_token"][i].as_py())

    def record(self, key: str) -> object:  # type: ignore[override]
        return replace(super().record(key), next_token=self.next_token)


def verify(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, server: RunningServer
) -> tuple[int, str]:
    arguments = ["verify", folder, "--head", server.model, "--against", server.url, "-n", 8]
    monkeypatch.setattr(sys, "argv", ["eagle3-data", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    out = capsys.readouterr()
    return int(end.value.code or 0), " ".join((out.out + out.err).split())


def test_right_data_passes_a_wrong_row_or_another_model_does_not(
    llama_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [prompt(30 + 5 * seed, seed) for seed in range(8)]
    run(llama_server, rows_file(tmp_path / "rows.jsonl", prompts), tmp_path / "good")
    code, printed = verify(monkeypatch, capsys, tmp_path / "good", llama_server)
    assert code == 0, printed
    assert "8 of 8 agree" in printed
    assert "re-extracted 8 samples" in printed

    data = ShardSet.open(tmp_path / "good")
    spec = CaptureSpec.from_dict(json.loads((tmp_path / "good/manifest.json").read_text())["capture"])
    dumps = [Taken(data, i) for i in range(8)]
    dumps[3].aux[7] = dumps[3].aux[7].flip(0)  # sealed with a right checksum: the server itself would have been wrong
    make_build(tmp_path / "bad", per_shard=4, spec=spec, dumps=dumps)
    code, printed = verify(monkeypatch, capsys, tmp_path / "bad", llama_server)
    assert code == 1
    assert "BAD sample 00000003: aux_hidden_states differs" in printed
    assert "aux_hidden_states, token 7)" in printed
    assert printed.count("BAD sample") == 1

    strangers = [FakeDump(spec, dump.tokens, seed) for seed, dump in enumerate(dumps)]
    for stranger, dump in zip(strangers, dumps, strict=True):
        stranger.ids = dump.ids
    make_build(tmp_path / "other", per_shard=4, spec=spec, dumps=strangers)
    code, printed = verify(monkeypatch, capsys, tmp_path / "other", llama_server)
    assert code == 1
    assert "0 of 8 agree" in printed
    monkeypatch.setattr("eagle3_data.cli.verify.verify_head", lambda where, head: [])
    code, printed = verify(monkeypatch, capsys, tmp_path / "other", llama_server)
    assert code == 1
    assert all(f"BAD sample {i:08d}: last_hidden_state differs" in printed for i in range(8))
    assert torch.equal(ShardSet.open(tmp_path / "other").read(0)[IDS], data.read(0)[IDS])
    assert llama_server.files() == []
