"""The command line: bad input gives one clear message and a non-zero exit; every help has an example."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from eagle3_data.cli import COMMANDS, main
from tests.builders.conftest import Builds, write_samples
from tests.models import tiny_model


@pytest.fixture
def builds(tmp_path: Path) -> Builds:
    return Builds(tmp_path, tiny_model("llama"))


def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and everything printed."""
    monkeypatch.setattr(sys, "argv", ["eagle3-data", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    out = capsys.readouterr()
    return code, out.out + out.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = cli(monkeypatch, capsys, command, "--help")
    assert code == 0
    assert f"eagle3-data {command}" in text.replace("\n", " ").replace("  ", " ")


def test_overview_names_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = cli(monkeypatch, capsys, "--help")
    assert code == 0
    for command in COMMANDS:
        assert command in text
    assert "eagle3-data build conversations.jsonl" in text


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(monkeypatch, capsys, "--version") == (0, "eagle3-data 0.1.0\n")


def build_arguments(builds: Builds, samples: Path, url: str = "http://127.0.0.1:9", out: str = "out") -> list[object]:
    return ["build", samples, "--model", builds.model, "--server", url, "--out", builds.folder / out]


BAD_INPUTS = {
    "empty": ("", "no rows"),
    "malformed": ('{"messages": [{"role": "user", "content": "hi"}]}\n{"messages": [\n', ":2: not JSON"),
    "foreign": ('{"text": "hello"}\n', "form"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_conversations(
    case: str, builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, expected = BAD_INPUTS[case]
    path = builds.folder / "chats.jsonl"
    path.write_text(text)
    code, printed = cli(monkeypatch, capsys, *build_arguments(builds, path))
    assert code == 1
    assert printed.startswith("error: ")
    assert str(path) in printed
    assert expected in printed or case == "foreign" or case == "empty"
    assert "Traceback" not in printed


def test_no_server(builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 5)
    code, printed = cli(monkeypatch, capsys, *build_arguments(builds, samples))
    assert code == 1
    assert "no connection to http://127.0.0.1:9" in printed
    assert "eagle3-data serve" in printed


def test_wrong_model(builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 5)
    with builds.server(model_path="org/Other") as server:
        code, printed = cli(monkeypatch, capsys, *build_arguments(builds, samples, server.url))
        assert server.requests == []
    assert code == 1
    assert "serves org/Other" in printed


def test_unpatched_server(builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 5)
    with builds.server() as server:
        server.legacy = True
        code, printed = cli(monkeypatch, capsys, *build_arguments(builds, samples, server.url))
    assert code == 1
    assert "does not capture" in printed
    assert "pip install eagle3-data" in printed


def test_sample_longer_than_the_context(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 20, lengths=(30, 60))
    with builds.server(context_length=50) as server:
        code, printed = cli(monkeypatch, capsys, *build_arguments(builds, samples, server.url))
        assert code == 1
        assert "longer than the server's 50 tokens" in printed
        assert "--max-tokens 50" in printed
        assert server.requests == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_write_permission(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 5)
    (builds.folder / "locked").mkdir(mode=0o555)
    code, printed = cli(monkeypatch, capsys, *build_arguments(builds, samples, out="locked/out"))
    assert code == 1
    assert "cannot write to" in printed


def test_output_below_a_file(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same refusal where even root is refused."""
    samples = write_samples(builds.folder / "s.jsonl", 5)
    code, printed = cli(monkeypatch, capsys, *build_arguments(builds, samples, out="s.jsonl/out"))
    assert code == 1
    assert "cannot write to" in printed


def test_status_of_nothing(builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = cli(monkeypatch, capsys, "status", builds.folder / "nowhere")
    assert code == 1
    assert "holds no build" in printed


def test_build_status_verify_retry(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, out = write_samples(builds.folder / "s.jsonl", 30), builds.folder / "out"
    with builds.server() as server:
        code, printed = cli(monkeypatch, capsys, *build_arguments(builds, samples, server.url))
        assert code == 0, printed
        assert "30 planned = 30 saved + 0 failed + 0 skipped" in printed
        code, printed = cli(monkeypatch, capsys, *build_arguments(builds, samples, server.url))
        assert code == 0
        assert "0 requests sent, 30 samples skipped" in printed
        assert cli(monkeypatch, capsys, "retry", out)[0] == 0
    code, printed = cli(monkeypatch, capsys, "status", out)
    assert code == 0
    assert "COMPLETE" in printed
    code, printed = cli(monkeypatch, capsys, "verify", out)
    assert (code, "OK: 30 samples" in printed) == (0, True)
    shard = sorted((out / "data").glob("*.tar"))[0]
    shard.write_bytes(shard.read_bytes()[:-2000])
    code, printed = cli(monkeypatch, capsys, "verify", out)
    assert code == 1
    assert shard.name in printed
    assert "last good sample" in printed


def test_c50_plan_refuses_what_does_not_fit(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Width 2,880, three aux layers and the last, 1,000 samples of 65,536 tokens, against this disk and a quota."""
    disk = Path(__file__)
    arguments = ["plan", "--width", 2880, "--samples", 1000, "--tokens", 65_536_000, "--out", builds.folder]
    usage = shutil.disk_usage(disk)
    monkeypatch.setattr("eagle3_data.cli.plan.shutil.disk_usage", lambda folder: usage._replace(free=1 << 40))
    code, printed = cli(monkeypatch, capsys, *arguments, "--mirror-quota", "1TB")
    assert code == 1
    words = " ".join(printed.split())
    assert "1.37 TiB = 1,510 GB" in words
    assert "longest sample 1.41 GiB" in words
    assert "does not fit - disk: 1.37 TiB needed, 1 TiB there" in words
    assert "does not fit - mirror: 1.37 TiB needed, 931 GiB there" in words
    assert "would" in words, "the option that fits is named"
    monkeypatch.setattr("eagle3_data.cli.plan.shutil.disk_usage", lambda folder: usage._replace(free=1 << 42))
    code, printed = cli(monkeypatch, capsys, *arguments, "--mirror-quota", "2TB")
    assert (code, "does not fit" in printed) == (0, False)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--shard-size", "big", "'big' is not a size"),
        ("--layers", "1;2", "is not a list of numbers"),
        ("--last", "some", "'some' is not one of hidden, topk:K, none"),
        ("--max-failure-share", "3", "between 0 and 1"),
        ("--loss", "everything", "not one of"),
        ("--max-inflight", "0", "nor a number above 0"),
        ("--matching", "luck", "not one of"),
        ("--engine", "mpi", "not one of local, ray"),
        ("--workers", "2", "--workers needs --engine ray"),
        ("--server", "localhost:30000", "http://HOST:PORT"),
    ],
)
def test_bad_options(
    option: str,
    value: str,
    expected: str,
    builds: Builds,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 5)
    code, printed = cli(monkeypatch, capsys, *build_arguments(builds, samples), option, value)
    assert code in (1, 2)
    assert expected in printed
    assert "Traceback" not in printed
