"""`eagle3-data push`, `pull`, `verify hf://...` and `status` as people run them: exit codes, messages, no secrets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from eagle3_data.shards.layout import remote_path
from tests.builds import make_build
from tests.hub.conftest import REPO, TOKEN
from tests.hub.stub import Fault, HubStub
from tests.hub.test_push import LENGTHS, check_whole, shards_of
from tests.test_cli import cli

pytestmark = pytest.mark.xdist_group("hub")
URL = f"hf://datasets/{REPO}"


class Run:
    """`run(...)`: exit code and everything printed, by the command in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> tuple[int, str]:
        code, text = cli(self.monkeypatch, self.capsys, *arguments)
        assert TOKEN not in text
        return code, text


@pytest.fixture
def run(hub: HubStub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.delenv("EAGLE3_DATA_SHARD_CACHE", raising=False)
    return Run(monkeypatch, capsys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_build(tmp_path / "data", LENGTHS)
    return tmp_path / "data"


def test_there_and_back(run: Run, hub: HubStub, folder: Path, tmp_path: Path) -> None:
    code, text = run("push", folder, REPO, "--license", "apache-2.0")
    assert code == 0
    assert f"{URL}: 6 of 6 shards published, 6 sent now" in text
    code, text = run("push", folder, REPO)
    assert code == 0
    assert "0 sent now (0 B), 6 were there, 0 commits" in text
    code, text = run("verify", URL)
    assert code == 0
    assert text.startswith(f"OK: {URL}, 6 shards, 12 samples")
    assert "by the mirror's own sha256, 0 problems" in text
    copy = tmp_path / "copy"
    code, text = run("pull", REPO, copy)
    assert code == 0
    assert f"{copy}: 6 shards, 0 were here, 6 fetched" in text
    assert "all checksums are right" in text
    code, text = run("pull", REPO, copy)
    assert code == 0
    assert "6 were here, 0 fetched (0 B)" in text
    assert run("verify", copy)[0] == 0
    assert shards_of(copy) == shards_of(folder)


def test_pull_takes_what_the_cache_has(run: Run, hub: HubStub, folder: Path, tmp_path: Path) -> None:
    from eagle3_data.shards import open_samples

    run("push", folder, REPO)
    cache = tmp_path / "cache"
    open_samples(REPO, shard_cache=cache).read(0)
    code, text = run("pull", REPO, tmp_path / "copy", "--cache-dir", cache)
    assert code == 0
    assert "6 shards, 0 were here, 1 from the cache, 5 fetched" in text
    assert shards_of(tmp_path / "copy") == shards_of(folder)
    (kept,) = cache.glob("*.tar")
    content = bytearray(kept.read_bytes())
    content[3000] ^= 1
    kept.write_bytes(content)
    code, text = run("pull", REPO, tmp_path / "again", "--shard-cache", cache)
    assert code == 0, "a damaged cache is found by the checksum, and the mirror asked instead"
    assert shards_of(tmp_path / "again") == shards_of(folder)


def test_verify_names_what_is_wrong(run: Run, hub: HubStub, folder: Path) -> None:
    run("push", folder, REPO)
    del hub.repository(REPO).head.tree[remote_path("train-000003.tar")]
    code, text = run("verify", URL)
    assert code == 1
    assert "BAD  train-000003.tar: not in the mirror" in text
    assert "1 problems" in text
    code, text = run("verify", "hf://datasets/org/nowhere")
    assert code == 1
    assert "error: open org/nowhere: HTTP 404" in text
    assert "next: check the name of the mirror and your access to it" in text
    code, text = run("pull", "not-a-mirror", folder)
    assert code == 1
    assert "next: ORG/NAME" in text


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (400, "the same command goes on from here"),
        (401, "log in (hf auth login) or set HF_TOKEN"),
        (403, "your token needs write access"),
    ],
)
def test_a_refused_push_goes_on(run: Run, hub: HubStub, folder: Path, status: int, hint: str) -> None:
    hub.faults.append(Fault("POST", "/commit/", status=status))
    code, text = run("push", folder, REPO)
    assert code == 1
    assert f"error: commit to {REPO}: HTTP {status}" in text
    assert f"next: {hint}" in text
    sent = len(hub.requests("PUT", "/lfs/"))
    assert run("push", folder, REPO)[0] == 0
    assert len(hub.requests("PUT", "/lfs/")) == sent, "what was sent before the refusal is not sent again"
    check_whole(hub, shards_of(folder))


def test_waiting_is_said(run: Run, hub: HubStub, folder: Path) -> None:
    hub.faults.append(Fault("POST", "/commit/", status=429, headers={"Retry-After": "1"}))
    code, text = run("push", folder, REPO)
    assert code == 0
    assert f"commit to {REPO}: HTTP 429" in text
    assert "again in 1 s" in text


def test_a_damaged_shard(run: Run, hub: HubStub, folder: Path) -> None:
    victim = folder / "data" / "train-000002.tar"
    content = bytearray(victim.read_bytes())
    content[3000] ^= 1
    victim.write_bytes(content)
    code, text = run("push", folder, REPO)
    assert code == 1
    assert "BAD  train-000002.tar is not what was sealed" in text
    assert "5 of 6 shards published" in text


def test_a_broken_pull_goes_on(run: Run, hub: HubStub, folder: Path, tmp_path: Path) -> None:
    run("push", folder, REPO)
    copy = tmp_path / "copy"
    hub.faults.append(Fault("GET", r"train-000005\.tar", status=403, times=100))
    code, text = run("pull", REPO, copy, "--workers", "1")
    assert code == 1
    assert "train-000005.tar" in text
    hub.faults.clear()
    hub.seen.clear()
    code, text = run("pull", REPO, copy)
    assert code == 0
    assert "5 were here, 1 fetched" in text
    assert len(hub.requests("GET", r"\.tar")) == 1


def test_removed_shards(run: Run, hub: HubStub, folder: Path) -> None:
    """verify checks them where they are, status says where that is, and what the mirror lost is told."""
    code, text = run("push", folder, REPO, "--delete-local")
    assert code == 0
    assert "6 removed here" in text
    code, text = run("verify", folder)
    assert code == 0
    assert f"shards that are not here are checked in {URL}" in text
    assert "6 shards (6 of them in a mirror)" in text
    assert hub.requests("GET", r"\.tar") == []
    assert f"6 shards, which are in {URL}" in " ".join(run("status", folder)[1].split())
    del hub.repository(REPO).head.tree[remote_path("train-000003.tar")]
    code, text = run("verify", folder)
    assert code == 1
    assert f"BAD  train-000003.tar in {URL}: not in the mirror" in text
    assert f"next: eagle3-data pull {URL} {folder}" in text


def test_a_published_shard_that_somebody_removed(run: Run, hub: HubStub, folder: Path) -> None:
    run("push", folder, REPO)
    (folder / "data" / "train-000001.tar").unlink()
    code, text = run("verify", folder)
    assert code == 1
    assert "BAD  train-000001.tar: it is in the manifest and not on disk" in text
    assert f"next: eagle3-data pull {URL} {folder}" in text
    assert run("pull", URL, folder)[0] == 0
    assert run("verify", folder)[0] == 0


# ------------------------------------------------------------- in a process of its own

MAIN = "from eagle3_data.cli import main; main()"
SLIP = """
import eagle3_data.hub.push as push
def run(self, more=None):
    from huggingface_hub import get_token
    raise RuntimeError(f"a slip of ours with Bearer {get_token()} and {get_token()} in it")
push.Push.run = run
from eagle3_data.cli import main
main()
"""


def start(code: str, hub: HubStub, *arguments: object) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_VERBOSITY": "debug",
        "HF_DEBUG": "1",
    }
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_interrupted_and_repeated(hub: HubStub, folder: Path) -> None:
    """Ctrl-C: what is on its way is published, exit code 130, and the same command sends only the rest."""
    asked, heard = threading.Event(), threading.Event()

    def interrupt(method: str, path: str) -> None:
        if method == "PUT" and not asked.is_set():
            asked.set()
            os.kill(process.pid, signal.SIGINT)
            heard.wait(200)  # the shard arrives only after the command has said that it stops

    hub.pace = interrupt
    process = start(MAIN, hub, "push", folder, REPO, "--workers", "1")
    assert process.stdout
    text = ""
    for line in process.stdout:
        text += line
        if "stopping after what is on its way" in line:
            heard.set()
    process.wait(200)
    process.stdout.close()
    assert process.returncode == 130, text
    assert heard.is_set()
    assert "the same command goes on from here" in text
    assert TOKEN not in text
    first = len([path for path in hub.files(REPO) if path.endswith(".tar")])
    assert first == 1
    process = start(MAIN, hub, "push", folder, REPO)
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    assert f"{6 - first} sent now" in text
    check_whole(hub, shards_of(folder))
    assert sum(hub.store.received.values()) == sum(hub.store.sizes[oid] for oid in hub.store.received)


@pytest.mark.parametrize("status", [401, 403])
def test_no_token_with_the_client_talking(hub: HubStub, folder: Path, status: int) -> None:
    """The stub's errors repeat the header they got, and the hub client logs all it does."""
    hub.faults.append(Fault("POST", "/commit/", status=status, times=1000))
    process = start(MAIN, hub, "push", folder, REPO)
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "***" in text
    assert TOKEN not in text
    assert any(TOKEN in seen.authorization for seen in hub.seen), "the token was used"


def test_no_token_in_a_traceback(hub: HubStub, folder: Path) -> None:
    process = start(SLIP, hub, "push", folder, REPO)
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "Traceback" in text
    assert "RuntimeError: a slip of ours with Bearer ***" in text
    assert TOKEN not in text
