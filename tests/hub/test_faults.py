"""A hub that refuses, and pushes that are killed: nothing twice, nothing missing, nothing removed too early."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_data.errors import MirrorError
from eagle3_data.hub.redact import redact
from eagle3_data.patience import Patience, judge
from eagle3_data.shards.http import retry_after
from eagle3_data.shards.layout import remote_path
from tests.builds import make_build
from tests.hub.conftest import QUICK, REPO, TOKEN, push
from tests.hub.stub import Fault, HubStub
from tests.hub.test_push import LENGTHS, check_whole, shards_of

pytestmark = pytest.mark.xdist_group("hub")
KILLS = 30

ZYGOTE = """
import os, sys, traceback
from pathlib import Path
from tests.hub.conftest import push
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if push(Path(line.strip()), commit_shards=7).complete else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""
"""Imports once and forks a push per line, so that thirty kills do not take thirty imports."""


class Killer:
    """Kills the push from inside a request, at a random one. Shards that were cut short before must have come first,
    as only then no byte can be on its way a third time."""

    def __init__(self, hub: HubStub, chooser: random.Random) -> None:
        self.hub, self.chooser, self.pid = hub, chooser, 0
        hub.pace = self.pace

    def arm(self) -> None:
        blobs = self.hub.store
        self.cut = [oid for oid in blobs.received if not blobs.blob(oid).exists()]
        self.early = self.chooser.random() < 0.4
        self.left = self.chooser.randrange(1, 7) if self.early else self.chooser.randrange(1, 25)

    def pace(self, method: str, path: str) -> None:
        with self.hub.store.lock:
            if not self.pid or (not self.early and any(not self.hub.store.blob(oid).exists() for oid in self.cut)):
                return
            self.left -= 1
            if self.left == 0:
                os.kill(self.pid, signal.SIGKILL)
                self.pid = 0


@pytest.mark.slow
def test_a_push_killed_thirty_times(hub: HubStub, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_build(folder, [280 + n % 40 for n in range(90)], per_shard=1)
    before, killer, kills = shards_of(folder), Killer(hub, random.Random(3)), 0
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    zygote = subprocess.Popen(
        [sys.executable, "-c", ZYGOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    assert zygote.stdin
    assert zygote.stdout
    try:
        while kills < KILLS:
            killer.arm()
            zygote.stdin.write(f"{folder}\n")
            zygote.stdin.flush()
            killer.pid = int(zygote.stdout.readline())
            status = int(zygote.stdout.readline())
            killer.pid = 0
            assert status in (0, signal.SIGKILL), "a push failed by itself"
            kills += status == signal.SIGKILL
        zygote.stdin.write(f"{folder}\n")
        zygote.stdin.flush()
        zygote.stdout.readline()
        assert zygote.stdout.readline() == "0\n"
    finally:
        zygote.kill()
        zygote.wait()
        zygote.stdin.close()
        zygote.stdout.close()
    check_whole(hub, before)
    assert shards_of(folder) == before
    store, files = hub.store, hub.files(REPO)
    ratios = [store.received[files[remote_path(name)].oid] / len(content) for name, content in before.items()]
    assert max(ratios) <= 2
    assert min(ratios) == 1
    for commit in hub.repository(REPO).commits[1:]:
        assert "manifest.json" in commit.tree


@pytest.mark.slow
def test_c72_refusals_over_500_shards(hub: HubStub, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_build(folder, [1 + n % 3 for n in range(500)], per_shard=1)
    before, too_early = shards_of(folder), []
    told = {"Retry-After": "1"}
    hub.faults += [
        Fault("POST", "/preupload/", status=429, headers=told, skip=20),
        Fault("POST", "/preupload/", status=504, skip=40),
        Fault("POST", "/objects/batch", status=504, skip=100),
        Fault("PUT", "/lfs/", status=429, headers=told, skip=200),
        Fault("POST", "/commit/", status=429, headers=told, skip=1),
        Fault("POST", "/commit/", status=504, skip=2),
        Fault("POST", "/commit/", status=504, skip=3, after=True),
        Fault("POST", "/paths-info/", status=429, headers=told, skip=2),
    ]

    def watch(method: str, path: str) -> None:
        if "/commit/" in path or "/paths-info/" in path:
            tree = hub.files(REPO)
            too_early.extend(
                name for name in before if not (folder / "data" / name).exists() and remote_path(name) not in tree
            )

    hub.pace = watch
    report = push(folder, delete_local=True, workers=4)
    assert all(fault.times == 0 for fault in hub.faults), "every fault was met"
    assert (report.complete, report.sent, report.deleted) == (True, 500, 500)
    assert 10 <= len(hub.repository(REPO).commits) - 1 <= 50
    check_whole(hub, before)
    assert too_early == []
    received = {remote_path(name): hub.store.received[hub.files(REPO)[remote_path(name)].oid] for name in before}
    distinct = {hub.files(REPO)[path].oid: received[path] for path in received}
    twice = [oid for oid, count in distinct.items() if count != hub.store.sizes[oid]]
    assert len(twice) <= 1, "at most the one shard whose PUT was refused came a second time"
    commits = hub.requests("POST", "/commit/")
    refused = [n for n, seen in enumerate(commits[1:], 1) if seen.t - commits[n - 1].t >= 1.0]
    assert refused, "the commit that was told to wait a second waited"


def test_waits_as_told(hub: HubStub, tmp_path: Path) -> None:
    """A commit is not the client's own retry but ours: the wait is the header's, not the back-off's."""
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    hub.faults.append(Fault("POST", "/commit/", status=429, headers={"Retry-After": "2"}))
    assert push(folder, patience=QUICK).complete
    first, second = hub.requests("POST", "/commit/")
    assert second.t - first.t >= 2.0


def test_gives_up_in_the_end(hub: HubStub, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    hub.faults.append(Fault("POST", "/commit/", status=503, times=10_000))
    with pytest.raises(MirrorError, match="HTTP 503"):
        push(folder, patience=Patience(first_s=0.01, longest_s=0.02, total_s=0.2))
    hub.faults.clear()
    assert push(folder).complete


@pytest.mark.parametrize("status", [401, 403, 500])
def test_tokens_are_never_shown(
    status: int, hub: HubStub, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The stub's errors repeat the Authorization header they got, as some proxies do."""
    caplog.set_level(logging.DEBUG)
    folder = tmp_path / "data"
    make_build(folder, LENGTHS)
    waits: list[str] = []
    hub.faults.append(Fault("POST", "/commit/", status=status, times=10_000))
    patience = Patience(first_s=0.01, longest_s=0.02, total_s=0.1, on_wait=waits.append)
    with pytest.raises(MirrorError) as caught:
        push(folder, patience=patience)
    assert any(TOKEN in seen.authorization for seen in hub.seen), "the token was used"
    written = "".join(path.read_text() for path in (folder / ".build").iterdir())
    # httpcore's wire trace repeats what the server said, at DEBUG; it is not ours to change
    logged = "".join(record.getMessage() for record in caplog.records if not record.name.startswith("httpcore"))
    shown = "".join(capfd.readouterr()) + logged + str(caught.value) + repr(patience) + written + "".join(waits)
    assert TOKEN not in shown
    assert "***" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("401 for Bearer abc.DEF-123", "abc.DEF-123"),
        ("token hf_abcdefABCDEF0123 is invalid", "hf_abcdefABCDEF0123"),
        ("cannot reach https://user:pa55@host/x", "pa55"),
        ("GET https://bucket/x?X-Amz-Signature=deadbeef&X-Amz-Credential=me", "deadbeef"),
        ('{"password": "hunter2"}', "hunter2"),
    ],
)
def test_redaction(text: str, secret: str) -> None:
    assert secret not in redact(text)
    assert len(redact(text)) > 10


def test_retry_after_is_a_number_or_a_date() -> None:
    assert retry_after({"Retry-After": "7"}) == 7
    assert retry_after({}) is None
    assert retry_after({"Retry-After": "soon"}) is None
    assert retry_after({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0


def test_what_is_worth_another_try() -> None:
    def wrapped(cause: BaseException) -> BaseException:
        try:
            raise RuntimeError("Error while uploading") from cause
        except RuntimeError as error:
            return error

    assert judge(wrapped(ConnectionResetError())).again
    assert judge(TimeoutError()).again
    assert not judge(wrapped(PermissionError())).again
    assert not judge(ValueError()).again
