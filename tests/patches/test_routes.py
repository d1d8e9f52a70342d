"""The dump endpoint: to this machine, or to those who have the server's key; names only, never paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
from starlette.applications import Starlette
from starlette.testclient import TestClient

from eagle3_data.patches.sglang.routes import add_routes, is_local
from eagle3_data.protocol import DUMP_SUFFIX

RID = "e3d-run-7-0"
REMOTE, LOCAL = "203.0.113.9", "127.0.0.1"


def client(spool: Path, *, keyed: bool, peer: str) -> Any:
    app = Starlette()
    add_routes(app, spool, keyed=keyed)
    return TestClient(app, client=(peer, 4711))


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "spool" / f"{RID}{DUMP_SUFFIX}"
    path.parent.mkdir()
    path.write_bytes(b"states")
    (tmp_path / f"secret{DUMP_SUFFIX}").write_bytes(b"secret")
    return path


@pytest.mark.parametrize(("keyed", "peer", "status"), [(False, REMOTE, 403), (False, LOCAL, 200), (True, REMOTE, 200)])
def test_off_loopback_it_needs_the_servers_key(dump: Path, keyed: bool, peer: str, status: int) -> None:
    """`keyed` stands for SGLang's own middleware, which then asks every caller for the key."""
    with client(dump.parent, keyed=keyed, peer=peer) as http:
        found = http.get(f"/eagle3/dumps/{RID}")
        assert (found.status_code, found.content == b"states") == (status, status == 200)
        gone = http.delete(f"/eagle3/dumps/{RID}")
        assert (gone.status_code, dump.exists()) == ((204, False) if status == 200 else (403, True))
        if status == 403:
            assert "--api-key" in found.json()["error"]


def test_names_are_never_paths(dump: Path) -> None:
    with client(dump.parent, keyed=False, peer=LOCAL) as http:
        for name in (
            "..%2Fsecret",
            "%2E%2E/secret",
            "e3d-../secret-0-0",
            "e3d-run-7-0%00",
            "e3d-run-7-0%2F..%2F..%2Fsecret",
        ):
            for answer in (http.get(f"/eagle3/dumps/{name}"), http.delete(f"/eagle3/dumps/{name}")):
                assert answer.status_code in (400, 404)
                assert b"secret" not in answer.content.replace(name.encode(), b"")
    assert (dump.parent.parent / f"secret{DUMP_SUFFIX}").exists()


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("0.0.0.0", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_what_counts_as_this_machine(host: str, local: bool) -> None:
    assert is_local(host) is local
