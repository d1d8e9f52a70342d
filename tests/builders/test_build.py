"""Builds over the replaying server: every fault it can show, and what the folder looks like afterwards."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import eagle3_data.builders.pool as pool
from eagle3_data import durable
from eagle3_data.builders.build import build
from eagle3_data.builders.ledger import Ledger
from eagle3_data.builders.samples.spec import SampleSpec
from eagle3_data.builders.stored import recall, remember
from eagle3_data.cli import main
from eagle3_data.cli.build import print_report, run_build
from eagle3_data.errors import (
    BuildFailed,
    ConfigError,
    ConnectionLost,
    DiskFull,
    DumpCorrupt,
    DumpFailed,
    DumpMismatch,
    DumpMissing,
    ManifestMismatch,
    NonFinite,
    RequestRejected,
    RequestTimeout,
    ServerError,
    ServerUnfit,
    SpoolFull,
)
from eagle3_data.journal import journal_path, read_tail
from eagle3_data.manifest import Manifest
from eagle3_data.protocol import ids_digest
from eagle3_data.runlock import RunLock
from eagle3_data.shards import ShardSet
from eagle3_data.status import read_status
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples
from tests.replay import Faults, states


def check_content(folder: Path, samples: Path, server_spec: object) -> None:
    """Every sample has the ids of its row and the states that those ids give."""
    rows = {f"{number:08d}": json.loads(line) for number, line in enumerate(samples.read_text().splitlines())}
    data = ShardSet.open(folder)
    assert len(set(data.keys)) == len(data)
    for i, key in enumerate(data.keys):
        sample, row = data.read(i), rows[key]
        assert sample["input_ids"].tolist() == row["input_ids"]
        assert sample["loss_mask"].tolist() == row["loss_mask"]
        aux, last = states(row["input_ids"], server_spec)  # type: ignore[arg-type]
        assert sample["aux_hidden_states"].numpy().tobytes() == aux
        assert sample["last_hidden_state"].numpy().tobytes() == last


def test_a_build_is_whole_and_verifies(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 60)
    with builds.server() as server:
        report = builds.run("out", samples, server.url)
        assert report.complete
        assert (report.saved, report.failed, report.skipped, report.planned) == (60, {}, {}, 60)
        check_content(builds.folder / "out", samples, server.spec)
        assert [p.name for p in server.spool.glob("e3d-*")] == []
    checked = verify(builds.folder / "out")
    assert checked.problems == []
    assert checked.samples == 60
    manifest = Manifest.load(builds.folder / "out")
    assert (manifest.state, manifest.saved, len(manifest.shards)) == ("complete", 60, manifest.plan.shards)
    assert manifest.nbytes == manifest.plan.nbytes
    status = read_status(builds.folder / "out")
    assert (status.state, status.done, status.of, status.nbytes) == ("COMPLETE", 60, 60, manifest.nbytes)
    visible = {path.name for path in (builds.folder / "out").iterdir() if not path.name.startswith(".")}
    assert visible == {"README.md", "data", "index", "manifest.json", "failures.jsonl"}


def test_same_dumps_same_bytes_in_any_order(builds: Builds) -> None:
    """Invariant 6: faults, retries and other concurrency leave no trace in the shards."""
    samples = write_samples(builds.folder / "s.jsonl", 50)
    with builds.server() as server:
        builds.run("calm", samples, server.url, max_inflight=1)
    wild = Faults(reply={1: "500", 9: "reset", 20: "500"}, dump={4: "none", 7: "truncated", 11: "late"}, late_s=0.3)
    with builds.server(wild, spool="spool2") as server:
        report = builds.run("wild", samples, server.url, max_inflight=16)
    assert report.complete
    assert sum(report.retried.values()) >= 5
    assert builds.shards("wild") == builds.shards("calm")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("other_ids", "mismatch"),
        ("other_rid", "mismatch"),
        ("fewer_rows", "mismatch"),
        ("truncated", "corrupt"),
        ("flipped_byte", "corrupt"),
        ("none", "no_dump"),
        ("error", "spool_full"),
        ("failed", "dump_failed"),
        ("nan", "non_finite"),
    ],
)
def test_a_bad_dump_is_never_saved(builds: Builds, fault: str, reason: str) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 12)
    with builds.server(Faults(dump={3: fault, 5: fault}), spool="spool") as server:
        report = builds.run("out", samples, server.url)
        check_content(builds.folder / "out", samples, server.spec)
    assert report.complete
    assert report.retried == {reason: 2}
    assert report.saved == 12


def test_every_class_of_failure_has_a_name_of_its_own_and_is_in_the_docs() -> None:
    """What ledgers count by, and whether it is tried again: the table of docs/extraction.md, held to the code."""
    text = (Path(__file__).parents[2] / "docs/extraction.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (yes|no)", text, re.MULTILINE))
    classes = [
        *(ServerError, ServerUnfit, ConnectionLost, RequestTimeout, RequestRejected, DumpMissing, DumpFailed),
        *(SpoolFull, DumpMismatch, DumpCorrupt, NonFinite, DiskFull),
    ]
    assert rows == {kind.reason: "yes" if kind.retryable else "no" for kind in classes}
    assert len(rows) == len(classes)


def test_cut_prompt_is_a_mismatch(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 6)
    with builds.server(Faults(reply={2: "short"})) as server:
        report = builds.run("out", samples, server.url)
    assert report.retried == {"mismatch": 1}


def test_c41_one_nan_in_a_hundred_is_counted_forty_stop_the_run(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 100)
    with builds.server(Faults(dump={17: "nan"})) as server:
        report = builds.run("one", samples, server.url, retries=0)
    assert report.complete
    assert (report.saved, report.failed) == (99, {"non_finite": 1})
    (row,) = [json.loads(line) for line in (builds.folder / "one/failures.jsonl").read_text().splitlines()]
    assert row["reason"] == "non_finite"
    end = read_tail(journal_path(builds.folder / "one"))[-1]
    assert end.failed_tokens == row["tokens"] == end.tokens_of - end.tokens
    assert verify(builds.folder / "one").ok

    faults = Faults(dump=dict.fromkeys(range(20, 60), "nan"))
    with builds.server(faults, spool="spool2") as server:
        with pytest.raises(BuildFailed, match="2 samples failed, more than the 1 allowed"):
            builds.run("forty", samples, server.url, retries=0)
        assert read_status(builds.folder / "forty").state == "FAILED"
        kept = Manifest.load(builds.folder / "forty").saved
        server.faults = Faults()
        report = builds.run("forty", samples, server.url, retry_failed=True)
    assert report.complete
    assert report.resumed >= kept
    assert report.saved == 100
    check_content(builds.folder / "forty", samples, server.spec)


def test_a_retry_that_is_killed_at_its_start_loses_no_sample(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 60)

    def killed(path: Path, text: str) -> None:
        if path.name == "retries.json":
            raise RuntimeError("killed")
        write_text(path, text)

    write_text = durable.write_text
    with builds.server(Faults(dump={3: "nan", 50: "nan"})) as server:
        assert builds.run("out", samples, server.url, retries=0, max_failure_share=0.1).failed == {"non_finite": 2}
        with monkeypatch.context() as patched:
            patched.setattr(durable, "write_text", killed)
            with pytest.raises(RuntimeError, match="killed"):
                builds.run("out", samples, server.url, retry_failed=True)
        assert builds.run("out", samples, server.url).failed == {"non_finite": 2}
        with monkeypatch.context() as patched:  # and between the two writes
            patched.setattr(Ledger, "forgive", lambda _: killed(Path("retries.json"), ""))
            with pytest.raises(RuntimeError, match="killed"):
                builds.run("out", samples, server.url, retry_failed=True)
        assert builds.run("out", samples, server.url).failed == {"non_finite": 2}
        report = builds.run("out", samples, server.url, retry_failed=True)
        assert (report.complete, report.saved, report.failed) == (True, 60, {})
        check_content(builds.folder / "out", samples, server.spec)


def test_retry_puts_failed_samples_in_shards_of_their_own(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 200)
    with builds.server(Faults(dump={3: "nan", 150: "nan"})) as server:
        first = builds.run("out", samples, server.url, retries=0)
        assert first.failed == {"non_finite": 2}
        before = {path.name: path.stat().st_mtime_ns for path in (builds.folder / "out/data").iterdir()}
        second = builds.run("out", samples, server.url, retry_failed=True)
        assert (second.sent, second.saved, second.failed) == (2, 200, {})
        after = {path.name: path.stat().st_mtime_ns for path in (builds.folder / "out/data").iterdir()}
        assert before.items() <= after.items()
        assert len(after) == len(before) + 1
        check_content(builds.folder / "out", samples, server.spec)
        assert builds.run("out", samples, server.url).sent == 0
    assert verify(builds.folder / "out").ok


def test_c46_resume_sends_exactly_what_is_missing(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,000 samples, stopped after 600; the second run is the command line's."""
    samples = write_samples(builds.folder / "s.jsonl", 1000, lengths=(8, 8))
    with (
        builds.server(Faults(reply=dict.fromkeys(range(600, 1000), "400"))) as server,
        pytest.raises(BuildFailed, match="11 samples failed, more than the 10 allowed"),
    ):
        builds.run("out", samples, server.url, max_inflight=1)
    assert read_status(builds.folder / "out").done == 600
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in (builds.folder / "out/data").glob("*.tar")}
    assert before
    with builds.server(spool="spool2") as server:
        remember(builds.config("out", samples, server.url))
        monkeypatch.setattr(sys, "argv", ["eagle3-data", "retry", str(builds.folder / "out")])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code in (None, 0)
        printed = " ".join(capsys.readouterr().out.split())
        assert "400 requests sent, 600 samples skipped (already saved)" in printed
        assert "1,000 planned = 1,000 saved + 0 failed + 0 skipped" in printed
        assert Counter(Counter(server.requests).values()) == {1: 400}
        check_content(builds.folder / "out", samples, server.spec)
        assert builds.run("out", samples, server.url).sent == 0
    after = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in (builds.folder / "out/data").glob("*.tar")}
    assert before.items() <= after.items()


def test_c54_three_percent_of_faults_are_retried_and_reported(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """500, timeout and reset for 3 % of the requests, and two samples that are rejected; then `retry`."""
    monkeypatch.setattr(pool, "PROBE_S", 0.02)
    samples = write_samples(builds.folder / "s.jsonl", 200)
    passing = {10: "500", 30: "reset", 60: "hang", 90: "500", 120: "reset", 150: "hang"}
    faults = Faults(reply={**passing, 70: "400", 71: "400"})
    with builds.server(faults) as server:
        report = builds.run(
            "out", samples, server.url, request_timeout_s=0.8, max_inflight=32, max_failure_share=0.02, retries=9
        )
        print_report(report)
        assert report.complete
        assert (report.saved, report.failed) == (198, {"rejected": 2})
        assert report.sent == 200 + sum(report.retried.values())
        assert set(report.retried) == {"server", "timeout", "connection"}
        printed = " ".join(capsys.readouterr().out.split())
        assert f"{report.sent:,} requests sent" in printed
        assert "200 planned = 198 saved + 2 failed + 0 skipped" in printed
        assert "failed 2 rejected" in printed
        assert all(f"{count} {reason}" in printed for reason, count in report.retried.items())
        rows = [json.loads(line) for line in (builds.folder / "out/failures.jsonl").read_text().splitlines()]
        assert {row["reason"] for row in rows} == {"rejected"}
        server.faults = Faults()
        before = len(server.requests)
        monkeypatch.setattr(sys, "argv", ["eagle3-data", "retry", str(builds.folder / "out")])
        remember(builds.config("out", samples, server.url))
        with pytest.raises(SystemExit):
            main()
        assert sorted(rid.split("-")[2] for rid in server.requests[before:]) == sorted(row["key"] for row in rows)
        assert "200 saved + 0 failed" in capsys.readouterr().out


def test_too_many_failures_are_an_exit_code(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 60)
    arguments = ["build", samples, "--model", builds.model, "--out", builds.folder / "out", "--max-failure-share", 0.1]
    with builds.server(Faults(reply=dict.fromkeys(range(20, 60), "400"))) as server:
        monkeypatch.setattr(sys, "argv", ["eagle3-data", *map(str, arguments), "--server", server.url])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert "7 samples failed, more than the 6 allowed; the last: " in error
    assert "eagle3-data retry DIR" in error
    assert read_status(builds.folder / "out").done >= 20


def test_c05_a_radix_cache_is_refused_before_work_starts(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 5)
    with builds.server(radix_cache=True) as server:
        with pytest.raises(ServerUnfit, match="radix cache on: prompts would come back short") as found:
            builds.run("out", samples, server.url)
        assert server.requests == []
    assert "--disable-radix-cache" in found.value.next


def test_given_up_samples_can_be_run_again_from_a_file(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 20)
    with builds.server(Faults(reply={4: "400"})) as server:
        report = builds.run("out", samples, server.url)
    assert report.failed == {"rejected": 1}
    (row,) = [json.loads(line) for line in (builds.folder / "out/failures.jsonl").read_text().splitlines()]
    assert row["detail"].endswith("injected")
    assert (row["attempts"], row["retry"]) == (1, "eagle3-data retry DIR")
    assert (report.saved + 1, report.planned) == (20, 20)


def test_changed_settings_are_refused_by_name(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 10)
    other = write_samples(builds.folder / "o.jsonl", 10, seed=5)
    changes: list[tuple[str, dict[str, Any]]] = [
        ("shard_bytes", {"shard_bytes": 128 << 10}),
        (r"capture\.last", {"last": "none"}),
        (r"capture\.aux_encoding", {"encoding": "fp8"}),
        ("dataset", {"dataset": "else"}),
        ("split", {"split": "test"}),
        (r"shards = None, now it is 0/2", {"part": (0, 2)}),
        (r"samples\.max_tokens", {"samples": SampleSpec(max_tokens=1000)}),
    ]
    with builds.server() as server:
        builds.run("out", samples, server.url)
        for field, change in changes:
            config = replace(builds.config("out", samples, server.url), **change)
            with pytest.raises(ManifestMismatch, match=field):
                build(config, on_tick=builds.ticks.append, on_text=builds.texts.append)
        with pytest.raises(ManifestMismatch, match="ids and masks"):
            builds.run("out", other, server.url)
        server.info_changes["vocab_size"] = 4096
        with pytest.raises(ManifestMismatch, match=r"capture\.vocab_size"):
            builds.run("out", samples, server.url)
        server.info_changes.clear()
        assert builds.run("out", samples, server.url).sent == 0


def test_a_refused_command_leaves_the_settings_of_the_folder(builds: Builds) -> None:
    """A mistyped --out: `retry` still does what the build was begun with."""
    samples = write_samples(builds.folder / "s.jsonl", 20)
    other = write_samples(builds.folder / "o.jsonl", 20, seed=5)
    with builds.server(Faults(reply={3: "400"})) as server:
        first = builds.config("out", samples, server.url, max_failure_share=0.2)
        run_build(first)
        assert recall(first.out) == first
        with pytest.raises(ManifestMismatch):
            run_build(builds.config("out", other, server.url, dataset="other"))
        with RunLock(first.out), pytest.raises(ConfigError, match="another builder works in"):
            run_build(builds.config("out", samples, server.url, max_failure_share=0.3))
        assert recall(first.out) == first
        run_build(replace(recall(first.out), retry_failed=True))
    manifest = Manifest.load(first.out)
    assert (manifest.state, manifest.saved, manifest.failed) == ("complete", 20, {})


def test_wrong_servers_are_refused_before_any_request(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 5)
    with builds.server(model_path="someone/Else-7B") as server, pytest.raises(ServerUnfit, match="Else-7B"):
        builds.run("a", samples, server.url)
    with builds.server(radix_cache=True) as server, pytest.raises(ServerUnfit, match="radix cache"):
        builds.run("b", samples, server.url)
    with builds.server() as server:
        with pytest.raises(ServerUnfit, match=r"captures outputs of layers \[1, 3, 4\]"):
            builds.run("c", samples, server.url, layers=(1, 2, 3))
        server.legacy = True
        with pytest.raises(ServerUnfit, match="does not capture"):
            builds.run("d", samples, server.url)
        assert server.requests == []
    with pytest.raises(ServerError, match="no connection"):
        builds.run("e", samples, server.url)
    with builds.server(context_length=40) as server, pytest.raises(ConfigError, match="longer than the server's 40"):
        builds.run("f", samples, server.url)


def test_two_servers_share_the_work_and_one_may_die(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 150)
    with builds.server(spool="s1") as one:
        one.delay_s = 0.005
        with builds.server(Faults(reply=dict.fromkeys(range(20, 5000), "reset")), spool="s2") as two:
            two.delay_s = 0.005
            report = builds.run("out", samples, one.url, two.url, max_inflight=4)
        assert report.complete
        assert report.saved == 150
        assert len(two.requests) >= 20
        assert report.retried.get("connection", 0) >= 1
        check_content(builds.folder / "out", samples, one.spec)


def test_no_server_alive_ends_the_run_and_the_next_goes_on(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 60)
    with builds.server(Faults(reply=dict.fromkeys(range(30, 9000), "reset"))) as server:
        server.info = lambda: {"protocol": 99}  # type: ignore[method-assign]  # it never comes back fit

        with pytest.raises(ServerUnfit):
            builds.run("out", samples, server.url)
    with builds.server(Faults(reply=dict.fromkeys(range(30, 9000), "reset")), spool="s2") as server:
        original = server.info

        def once() -> dict[str, object]:
            server.info = lambda: {"protocol": 99}  # type: ignore[method-assign]
            return original()

        server.info = once  # type: ignore[method-assign]
        with pytest.raises(BuildFailed, match="no server alive"):
            builds.run("out", samples, server.url, max_inflight=1)
    with builds.server(spool="s3") as server:
        report = builds.run("out", samples, server.url)
        assert report.resumed == 30
        assert report.sent == 30
        assert report.complete


def test_another_builder_in_the_folder_is_refused(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 5)
    (builds.folder / "out").mkdir()
    with builds.server() as server:
        with RunLock(builds.folder / "out"), pytest.raises(ConfigError, match="another builder works in"):
            builds.run("out", samples, server.url)
        assert builds.run("out", samples, server.url).complete


def test_leftover_dumps_of_this_build_are_used_others_never(builds: Builds) -> None:
    """A killed builder's dumps are proven like any other; strangers' and damaged ones are not."""
    samples = write_samples(builds.folder / "s.jsonl", 30, lengths=(30, 30))  # so that they are sent in order
    with builds.server(Faults(reply=dict.fromkeys(range(10, 40), "400"))) as server:
        with pytest.raises(BuildFailed):
            builds.run("out", samples, server.url, max_inflight=1)
        manifest = Manifest.load(builds.folder / "out")
        rows = [json.loads(line)["input_ids"] for line in samples.read_text().splitlines()]
        server.faults = Faults()

        def leave(number: int, ids: list[int], run: str, fault: str = "", instance: str = server.instance) -> None:
            from tests.replay import write_dump

            write_dump(server.spool, f"e3d-{run}-{number:08d}-0", ids, server.spec, instance, fault)

        leave(20, rows[20], manifest.run)
        leave(21, rows[21], manifest.run)
        leave(22, rows[23], manifest.run)  # another prompt's ids under this name
        leave(24, rows[24], manifest.run, "truncated")
        leave(25, rows[25], manifest.run, instance="a-server-we-never-checked")
        leave(26, rows[26], "someoneelse")
        report = builds.run("out", samples, server.url, retry_failed=True)
        assert report.adopted == 2
        assert report.sent == 18
        check_content(builds.folder / "out", samples, server.spec)
        assert [path.name.split("-")[1] for path in server.spool.glob("e3d-*")] == ["someoneelse"]


def test_journal_tells_the_truth(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 80)
    with builds.server() as server:
        server.delay_s = 0.05
        report = builds.run("out", samples, server.url, interval_s=0.05, max_inflight=4)
    ticks = read_tail(journal_path(builds.folder / "out"))
    assert ticks[0].event == "start"
    assert (ticks[-1].event, ticks[-1].phase) == ("end", "finished")
    assert {tick.of for tick in ticks} == {80}
    for earlier, later in itertools.pairwise(ticks):
        assert later.done >= earlier.done
        assert later.nbytes >= earlier.nbytes
        assert later.tokens >= earlier.tokens
    assert ticks[-1].nbytes == report.nbytes == sum(len(data) for data in builds.shards("out").values())


def test_aux_only(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 10)
    with builds.server() as server:
        assert builds.run("out", samples, server.url, last="none").complete
    assert verify(builds.folder / "out").ok
    data = ShardSet.open(builds.folder / "out")
    assert data.columns == ("aux_hidden_states", "input_ids", "loss_mask")
    assert data.capture.state_bytes_per_token == 3 * 32 * 4


def test_remote_server_without_a_shared_folder(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 20)
    with builds.server() as server:
        local = builds.run("local", samples, server.url)
        (server.spool / f".server-{server.instance}").unlink()
        remote = builds.run("remote", samples, server.url)
        assert local.saved == remote.saved == 20
        assert list(server.spool.glob("e3d-*")) == []
    assert builds.shards("local") == builds.shards("remote")


def test_request_ids_carry_run_and_attempt(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 3, lengths=(20, 20))
    with builds.server(Faults(reply={0: "500"})) as server:
        builds.run("out", samples, server.url, max_inflight=1)
    run = Manifest.load(builds.folder / "out").run
    assert sorted(server.requests) == [
        f"e3d-{run}-00000000-0",
        f"e3d-{run}-00000000-1",
        f"e3d-{run}-00000001-0",
        f"e3d-{run}-00000002-0",
    ]
    assert ids_digest([1, 2, 3]) != ids_digest([1, 2, 4])
