"""Starting servers: command lines, environments, refusals, and what happens when somebody dies."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eagle3_data.errors import ConfigError, ServerError
from eagle3_data.protocol import SPOOL_ENV, SpoolConfig
from eagle3_data.server import process
from eagle3_data.server.command import (
    CPU_RANKS_ENV,
    ServerConfig,
    inspect_sglang,
    prepare_spool,
    server_command,
    server_environment,
)
from eagle3_data.server.doctor import diagnose
from eagle3_data.server.process import ServerProcess
from tests.servers import capture_config, run

GPU = ServerConfig(model="org/model", spool=Path("/spool"), device="cuda", tp=8, extra_args=("--trust-remote-code",))


def text(config: ServerConfig, *, native: bool = True) -> str:
    return " ".join(server_command(config, port=1, native=native))


def test_commands() -> None:
    gpu = text(GPU)
    assert "--tp-size 8" in gpu
    assert "--disable-radix-cache --disable-cuda-graph" in gpu
    assert "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3 --max-running-requests 128" in gpu
    assert gpu.endswith("--trust-remote-code")
    assert "cpu" not in gpu
    assert "fusion" not in gpu
    assert "speculative" not in text(GPU, native=False)
    assert "--enforce-disable-flashinfer-allreduce-fusion" in text(GPU, native=False)
    assert "fusion" not in text(dataclasses.replace(GPU, tp=1), native=False)
    cpu = text(dataclasses.replace(GPU, device="cpu", dtype="float32"))
    assert "--device cpu --attention-backend torch_native" in cpu
    assert "--dtype float32" in cpu
    plain = text(dataclasses.replace(GPU, spool=None))
    assert "radix" not in plain
    assert "speculative" not in plain
    parallel = text(dataclasses.replace(GPU, device="cpu", extra_args=("--dp-size", "8", "--enable-dp-attention")))
    assert "--decode-attention-backend intel_amx --prefill-attention-backend intel_amx" in parallel
    newer = text(dataclasses.replace(GPU, device="cpu", extra_args=("--attn-dp-size=8",)))
    assert "--prefill-attention-backend intel_amx" in newer
    draft = text(dataclasses.replace(GPU, spool=None, draft="/draft", device="cpu"))
    assert "--decode-attention-backend intel_amx --prefill-attention-backend intel_amx" in draft
    assert "--prefill-attention-backend" not in cpu, "with torch_native the states equal those of transformers"
    assert "--speculative-draft-model-path /draft --speculative-num-steps 3" in draft
    assert "--speculative-num-draft-tokens 4" in draft
    with pytest.raises(ConfigError, match="cannot capture"):
        dataclasses.replace(GPU, draft="/draft")


def test_environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SPOOL_ENV, "/somebody/elses")
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    env = server_environment(GPU)
    assert env[SPOOL_ENV] == "/spool"
    assert env["SGLANG_PLUGINS"] == "other,eagle3_data"
    assert env["PYTHONPATH"] == "/mine"
    assert "SGLANG_USE_CPU_ENGINE" not in env
    plain = server_environment(dataclasses.replace(GPU, spool=None, device="cpu", model=str(tmp_path)))
    assert SPOOL_ENV not in plain
    stubs, mine = plain["PYTHONPATH"].split(os.pathsep)
    assert (Path(stubs) / "sgl_kernel" / "__init__.py").is_file()
    assert (Path(stubs) / "torchvision" / "__init__.py").is_file()
    assert mine == "/mine"
    assert plain["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("captures", [False, True])
def test_a_server_that_was_stopped_has_left_nothing(
    captures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that is there for a second after the kill, as one that gives GPU memory back may be, is waited for."""
    code = "import time; time.sleep(100)"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"]
    monkeypatch.setattr(process, "server_command", lambda *_, **__: command)
    monkeypatch.setattr(process, "inspect_sglang", lambda *_: (0, 5, 23))
    monkeypatch.setattr(ServerProcess, "_wait_until_healthy", lambda _: wait_for_children())
    spool = {"spool": tmp_path / "spool", "spool_config": SpoolConfig()} if captures else {"spool": None}
    server = ServerProcess(dataclasses.replace(GPU, tp=1, **spool), log=tmp_path / "log")  # type: ignore[arg-type]
    signals: list[int] = []
    kill = os.killpg

    def slowly(group: int, number: int) -> None:
        signals.append(number)
        if number == signal.SIGKILL:
            os.kill(group, number)
            threading.Timer(1.0, kill, (group, number)).start()

    def wait_for_children() -> None:
        assert server._process is not None
        while len(group_of(server._process.pid)) < 2:
            time.sleep(0.05)

    monkeypatch.setattr(process, "GRACE_S", 0.1)
    monkeypatch.setattr(os, "killpg", slowly)
    server.start()
    assert server._process is not None
    below = group_of(server._process.pid)
    server.stop()
    assert not any(alive(pid) for pid in below)
    assert signals == [signal.SIGTERM, signal.SIGKILL][not captures :]


def test_ranks_on_a_cpu_have_cpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 6, 7, 9}, raising=False)
    two = dataclasses.replace(GPU, spool=None, device="cpu", tp=2)
    assert server_environment(two)[CPU_RANKS_ENV] == "3,6,9|4,7"
    assert server_environment(dataclasses.replace(two, tp=6))[CPU_RANKS_ENV] == "3|4|6|7|9|3"
    assert CPU_RANKS_ENV not in server_environment(dataclasses.replace(two, tp=1))
    monkeypatch.setenv(CPU_RANKS_ENV, "0-31|32-63")
    assert server_environment(two)[CPU_RANKS_ENV] == "0-31|32-63"


def test_interpreters_without_sglang_are_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(ConfigError, match="has no SGLang"):
        inspect_sglang(dataclasses.replace(GPU, python=str(bare)), os.environ)
    (tmp_path / "sglang-0.5.20.dist-info").mkdir()
    (tmp_path / "sglang-0.5.20.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.20\n")
    beside = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.20 and not our plugin: No module named 'eagle3_data'"):
        inspect_sglang(dataclasses.replace(GPU, python=str(bare)), beside)
    assert inspect_sglang(dataclasses.replace(GPU, python=str(bare), spool=None), beside) == (0, 5, 20)
    with pytest.raises(ConfigError, match="cannot be run"):
        inspect_sglang(dataclasses.replace(GPU, python=str(tmp_path / "missing")), os.environ)


def test_spool_settings(tmp_path: Path) -> None:
    spool = tmp_path / "a" / "spool"
    prepare_spool(spool, GPU)
    assert not (spool / "eagle3.json").exists()
    SpoolConfig(high_water_bytes=5).save(spool)
    prepare_spool(spool, dataclasses.replace(GPU, layers=(1, 2)))
    assert SpoolConfig.load(spool) == SpoolConfig(high_water_bytes=5, layers=(1, 2))
    (spool / "eagle3.json").write_text('{"high_water": 5}')
    with pytest.raises(ConfigError, match="unknown field 'high_water'"):
        prepare_spool(spool, GPU)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="spool"):
        prepare_spool(tmp_path / "file", GPU)


@pytest.mark.server
@pytest.mark.slow
def test_a_refusal_is_one_clear_message(tiny_llama: Path, tmp_path: Path) -> None:
    """The plugin refuses inside SGLang, before the model is loaded; the message arrives here whole."""
    config = capture_config(tiny_llama, tmp_path / "spool", "--allow-auto-truncate")
    seen: list[str] = []
    with pytest.raises(ServerError) as raised:
        ServerProcess(
            config, log=tmp_path / "log", start_timeout_s=240, on_progress=lambda _, line: seen.append(line)
        ).start()
    assert "eagle3-data refuses to capture: --allow-auto-truncate is on" in raised.value.message
    assert "Traceback" not in raised.value.message
    assert seen


PARENT = """
import sys, time
from pathlib import Path
from eagle3_data.server.process import ServerConfig, ServerProcess
server = ServerProcess(ServerConfig(model=sys.argv[1], device="cpu", dtype="float32"), log=Path(sys.argv[2]))
server.start()
print(server.url, flush=True)
time.sleep(600)
"""


def group_of(pid: int) -> list[int]:
    """Living processes below `pid`, whatever group or session they are in."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(entry.parent.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {pid})


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.server
@pytest.mark.slow
def test_the_server_dies_with_a_parent_that_is_killed(tiny_llama: Path, tmp_path: Path) -> None:
    """Also: a server without our plugin's spool is reported as not patched."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny_llama), str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        assert url.startswith("http://"), (tmp_path / "log").read_text()[-2000:]
        diagnosis = run(diagnose(url))
        assert [(check.name, check.ok) for check in diagnosis.checks][-1] == ("patched", False)
        assert "pip install eagle3-data" in diagnosis.checks[-1].next
        below = group_of(parent.pid)
        assert len(below) >= 4  # the watcher, SGLang, its scheduler and its detokenizer
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in below):
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_text() for pid in below if alive(pid)]
        time.sleep(0.1)
