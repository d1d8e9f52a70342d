"""`verify --head` and `--against` as a person runs them; against the real server: tests/server/test_against.py."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import tests.replay as replay
from eagle3_data.builders import reextract
from eagle3_data.capture import CaptureSpec
from eagle3_data.cli import main
from eagle3_data.patience import Patience
from tests.builders.conftest import Builds, write_samples
from tests.models import VOCAB, WIDTH
from tests.replay import SPEC, Faults, ReplayServer

WRONG = 5
"""The sample of which a test gets one state row wrong."""


def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["eagle3-data", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    out = capsys.readouterr()
    return int(end.value.code or 0), " ".join((out.out + out.err).split())


def server_of(builds: Builds, spool: str = "spool") -> ReplayServer:
    """Its top-1 tokens are those of the tiny Llama's head."""
    server = ReplayServer(builds.folder / spool, replace(SPEC, model=str(builds.model), vocab_size=VOCAB, width=WIDTH))
    server.head = load_file(builds.model / "model.safetensors")["lm_head.weight"].numpy().astype(np.float32)
    return server


def one_row_wrong(monkeypatch: pytest.MonkeyPatch, samples: Path, row: int) -> None:
    """From now on the server's states of one prompt have one row negated, in aux and last, checksums and all."""
    wanted = json.loads(samples.read_text().splitlines()[WRONG])["input_ids"]
    real = replay.states

    def states(ids: list[int], spec: CaptureSpec) -> tuple[bytes, bytes]:
        aux, last = real(ids, spec)
        if ids != wanted:
            return aux, last
        both = []
        for data in (aux, last):
            array = np.frombuffer(data, "<f4").reshape(len(ids), -1).copy()
            array[row] *= -1
            both.append(array.tobytes())
        return both[0], both[1]

    monkeypatch.setattr(replay, "states", states)


def test_head_of_the_target_agrees_and_another_does_not(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, out = write_samples(builds.folder / "s.jsonl", 20), builds.folder / "out"
    with server_of(builds) as server:
        builds.run("out", samples, server.url)
    code, printed = cli(monkeypatch, capsys, "verify", out, "--head", builds.model)
    assert code == 0, printed
    assert "20 of 20 agree" in printed
    other = builds.folder / "other-model"
    shutil.copytree(builds.model, other)
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0).contiguous()
    save_file(weights, other / "model.safetensors")
    code, printed = cli(monkeypatch, capsys, "verify", out, "--head", other)
    assert code == 1
    assert "of 20 agree" in printed
    assert "BAD top-1 of stored state x head" in printed
    assert "(000000" in printed, "a sample is named"


def test_head_finds_one_wrong_state(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The token that the server recorded is the prompt's own; the state beside it is not."""
    samples, out = write_samples(builds.folder / "s.jsonl", 20), builds.folder / "out"
    real = replay.states
    with server_of(builds) as server:
        one_row_wrong(monkeypatch, samples, -1)
        honest = replay.write_dump

        def write_dump(spool: Path, rid: str, ids: list[int], spec: CaptureSpec, *rest: object) -> Path:
            token = replay.top_token(real(ids, spec)[1], spec, server.head)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(replay, "top_token", lambda *arguments: token)
                return honest(spool, rid, ids, spec, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(replay, "write_dump", write_dump)
        builds.run("out", samples, server.url)
    code, printed = cli(monkeypatch, capsys, "verify", out, "--head", builds.model)
    assert code == 1
    assert "19 of 20 agree" in printed
    assert f"{WRONG:08d}" in printed


def test_against_names_the_sample_with_a_wrong_row(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, out = write_samples(builds.folder / "s.jsonl", 12), builds.folder / "out"
    with server_of(builds) as server:
        builds.run("good", samples, server.url)
        with monkeypatch.context() as patch:
            one_row_wrong(patch, samples, 1)
            builds.run("out", samples, server.url)
        code, printed = cli(monkeypatch, capsys, "verify", builds.folder / "good", "--against", server.url, "-n", 12)
        assert code == 0, printed
        assert "re-extracted 12 samples: 12 bit-equal" in printed
        code, printed = cli(monkeypatch, capsys, "verify", out, "--against", server.url, "-n", 12)
        assert code == 1
        assert "11 bit-equal" in printed
        assert f"BAD sample {WRONG:08d}: aux_hidden_states differs by 2" in printed
        assert "token 1)" in printed
        assert list(server.spool.glob("e3d-*")) == []
        server.info_changes["model_path"] = "someone/Else-7B"
        code, printed = cli(monkeypatch, capsys, "verify", out, "--against", server.url)
        assert code == 1
        assert "serves someone/Else-7B" in printed


@pytest.mark.parametrize("fault", ["500", "reset"])
def test_a_passing_fault_of_the_server_is_not_the_datas(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    monkeypatch.setattr(reextract, "PATIENCE", Patience(first_s=0.01, total_s=600.0))
    samples, out = write_samples(builds.folder / "s.jsonl", 8), builds.folder / "out"
    with builds.server() as server:
        builds.run("out", samples, server.url)
    with builds.server(Faults(reply={0: fault, 3: fault, 4: fault, 5: fault}), spool="again") as server:
        code, printed = cli(monkeypatch, capsys, "verify", out, "--against", server.url, "-n", 8)
        assert code == 0, printed
        assert "re-extracted 8 samples: 8 bit-equal" in printed
        assert len(set(server.requests)) == len(server.requests) == 12
        assert list(server.spool.glob("e3d-*")) == []
    with builds.server(Faults(reply=dict.fromkeys(range(4), fault)), spool="thrice") as server:
        code, printed = cli(monkeypatch, capsys, "verify", out, "--against", server.url, "-n", 8)
        assert code == 1, printed
        assert "not compared (4 tries): " in printed
        assert "7 bit-equal" in printed
    with builds.server(Faults(reply={0: "400"}), spool="refused") as server:
        code, printed = cli(monkeypatch, capsys, "verify", out, "--against", server.url, "-n", 8)
        assert (code, len(server.requests)) == (1, 8), "what would be refused again is not asked for again"
    code, printed = cli(monkeypatch, capsys, "verify", out, "--against", "http://127.0.0.1:1", "-n", "-1")
    assert code == 2
    assert "Invalid value for '--samples'" in printed
