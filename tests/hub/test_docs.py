"""The commands and the Python of docs/mirrors.md, run in their order against the stub."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import datasets
import pytest

from eagle3_data.verify import verify
from tests.builds import make_build
from tests.hub.stub import HubStub
from tests.hub.test_push import LENGTHS, shards_of
from tests.test_cli import cli

pytestmark = pytest.mark.xdist_group("hub")
DOCS = Path(__file__).parent.parent.parent / "docs" / "mirrors.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", DOCS.read_text(), re.DOTALL)


def test_commands(
    hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_build(tmp_path / "kimi-data", LENGTHS)
    before = shards_of(tmp_path / "kimi-data")
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(lines) >= 7
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "eagle3-data"
        code, text = cli(monkeypatch, capsys, *arguments)
        assert code == 0, f"{line}\n{text}"
    assert shards_of(tmp_path / "kimi-data") == shards_of(tmp_path / "kimi-copy") == before
    assert verify(tmp_path / "kimi-copy").ok


def test_python(hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.hub.conftest import push

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    make_build(tmp_path / "data", LENGTHS)
    push(tmp_path / "data", "my-org/kimi-k25-states")
    code = blocks("python")[0].replace("/scratch/shards", str(tmp_path / "shards"))
    names: dict[str, object] = {}
    exec(compile(code, str(DOCS), "exec"), names)
    first = names["first"]
    assert isinstance(first, dict)
    assert len(first["input_ids"]) == LENGTHS[0]
    assert len(list((tmp_path / "shards").glob("*.tar"))) == 1
