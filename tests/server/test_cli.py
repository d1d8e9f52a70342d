"""`eagle3-data serve` and `doctor` as a person runs them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3_data.server.process import free_port
from tests.servers import SPOOL, new_spool

COMMAND = [sys.executable, "-c", "from eagle3_data.cli import main; main()"]


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("doctor", f"http://127.0.0.1:{free_port()}"), "eagle3-data serve"),
        (("doctor", "localhost:1"), "http://HOST:PORT"),
        (("doctor", "http://127.0.0.1:1", "--layers", "a,b"), "--layers 1,29,57"),
        (("serve", "--model", "m", "--device", "tpu"), "auto, cpu, cuda"),
        (("serve", "--model", "m", "--python", "/no/python", "--spool", "/tmp/x"), "/no/python cannot be run"),
        (("serve", "--model", "m", "--layers", "5,1", "--spool", "/tmp/eagle3-test-unused"), "ascending"),
    ],
)
def test_errors_are_one_message_with_a_next_step(arguments: tuple[str, ...], words: str) -> None:
    done = run_cli(*arguments)
    assert done.returncode != 0
    assert words in done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_help_has_an_example(command: str) -> None:
    done = run_cli(command, "--help")
    assert done.returncode == 0
    assert f"Example: eagle3-data {command}" in " ".join(done.stdout.split())


@pytest.mark.server
@pytest.mark.slow
def test_serve_until_ctrl_c(tiny_llama: Path, tmp_path: Path) -> None:
    spool = new_spool()
    SPOOL.save(spool)
    options = ["--model", str(tiny_llama), "--spool", str(spool), "--port", str(free_port()), "--dtype", "float32"]
    options += ["--device", "cpu", "--log", str(tmp_path / "log"), "--", "--chunked-prefill-size", "64"]
    with (tmp_path / "out").open("w") as out:
        serve = subprocess.Popen([*COMMAND, "serve", *options], stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 240
        while "ready" not in (tmp_path / "out").read_text():
            assert serve.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        text = (tmp_path / "out").read_text()
        assert "canary of 81 tokens" in text
        assert "1, 3, 4 (output_of_layer)" in text
        serve.send_signal(signal.SIGINT)
        assert serve.wait(60) == 0
    finally:
        serve.kill()
        subprocess.run(["rm", "-rf", str(spool)], check=True)
