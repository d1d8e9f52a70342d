"""Matching by token count: the weaker way, for servers whose dumps carry no identity."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from eagle3_data.errors import ConfigError
from eagle3_data.manifest import Manifest
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples
from tests.builders.test_build import check_content
from tests.replay import Faults, ReplayServer


def legacy(server: ReplayServer) -> ReplayServer:
    server.legacy = True
    return server


def spool(server: ReplayServer) -> dict[str, object]:
    return {"matching": "token_count", "spool": server.spool, "layers": (1, 3, 4)}


@pytest.fixture
def wide(builds: Builds) -> Builds:
    """The replaying server must have the width of the model's config."""
    from dataclasses import replace

    plain = builds.server

    def server(faults: Faults | None = None, spool: str = "spool", **info: object) -> ReplayServer:
        made = plain(faults, spool, **info)
        made.spec = replace(made.spec, width=64)
        return legacy(made)

    builds.server = server  # type: ignore[method-assign]
    return builds


def test_never_two_of_a_length_in_flight(wide: Builds) -> None:
    samples = write_samples(wide.folder / "s.jsonl", 60, lengths=(5, 9))
    with wide.server() as server:
        server.delay_s = 0.01
        report = wide.run("out", samples, server.url, max_inflight=16, **spool(server))
        assert report.complete
        assert server.most_of_a_length == 1
        check_content(wide.folder / "out", samples, server.spec)
    manifest = Manifest.load(wide.folder / "out")
    assert manifest.matching == "token_count"
    assert verify(wide.folder / "out").ok


def test_stale_dump_is_never_a_candidate(wide: Builds) -> None:
    """The first fault of the first system: a dump of an earlier run with the right number of rows."""
    samples = write_samples(wide.folder / "s.jsonl", 12, lengths=(6, 6))
    with wide.server() as server:
        for number in range(5):
            server._write_legacy([number] * 6, "")
        stale = {path.name for path in server.spool.glob("req_*")}
        report = wide.run("out", samples, server.url, **spool(server))
        assert report.saved == 12
        check_content(wide.folder / "out", samples, server.spec)
        assert stale <= {path.name for path in server.spool.glob("req_*")}


def test_late_dump_is_thrown_away_not_given_to_the_next(wide: Builds) -> None:
    """The third fault: it lands after its request was given up, while another of that length waits to be sent."""
    samples = write_samples(wide.folder / "s.jsonl", 8, lengths=(6, 6))
    faults = Faults(dump={2: "late"}, late_s=0.8)
    with wide.server(faults) as server:
        report = wide.run("out", samples, server.url, dump_timeout_s=0.2, **spool(server))
        assert report.saved == 8
        assert report.retried == {"no_dump": 1}
        check_content(wide.folder / "out", samples, server.spec)


def test_missing_dump_opens_its_length_again_when_the_server_is_idle(
    wide: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3_data.builders.matching.token_count.IDLE_S", 0.5)
    samples = write_samples(wide.folder / "s.jsonl", 6, lengths=(6, 6))
    with wide.server(Faults(dump={2: "none"})) as server:
        started = time.monotonic()
        report = wide.run("out", samples, server.url, dump_timeout_s=0.2, **spool(server))
        assert report.saved == 6
        assert time.monotonic() - started < 15
        check_content(wide.folder / "out", samples, server.spec)


def test_pickles_are_refused(wide: Builds) -> None:
    samples = write_samples(wide.folder / "s.jsonl", 2)
    with wide.server() as server:
        plain = server._write_legacy

        def pickle_instead(ids: list[int], fault: str) -> None:
            plain(ids, fault)
            for path in server.spool.glob("req_*/*.safetensors"):
                path.rename(path.with_suffix(".pt"))

        server._write_legacy = pickle_instead  # type: ignore[method-assign]
        report = None
        with pytest.raises(Exception, match="pickle") as caught:
            report = wide.run("out", samples, server.url, retries=0, max_failure_share=0.0, **spool(server))
        assert report is None
        assert not isinstance(caught.value, AssertionError)


def test_needs_its_spool(builds: Builds, tmp_path: Path) -> None:
    samples = write_samples(tmp_path / "s.jsonl", 2)
    with pytest.raises(ConfigError, match="needs --spool"):
        builds.config("out", samples, "http://127.0.0.1:1", matching="token_count")
    assert json.loads(samples.read_text().splitlines()[0])["id"] == "row-0"
