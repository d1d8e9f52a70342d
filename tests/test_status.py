"""What `status` says: the line people know, and when a run is stalled, dead, or ended."""

from __future__ import annotations

import fcntl
import time
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_data import runlock
from eagle3_data.errors import ConfigError
from eagle3_data.journal import Journal, Tick
from eagle3_data.runlock import RunLock
from eagle3_data.status import format_line, format_share, read_status, summarise

TIB = 1 << 40
START = Tick(
    event="start",
    t=1000.0,
    phase="extract",
    done=12_749,
    of=37_312,
    tokens=30_000_000,
    tokens_of=87_800_000,
    nbytes=int(1.17 * TIB),
    nbytes_of=int(3.43 * TIB),
    slowest_s=40.0,
)
LATER = replace(
    START,
    event="tick",
    t=1120.0,
    done=12_880,
    tokens=30_309_840,
    nbytes=int(1.18 * TIB),
    failed={"mismatch": 2, "timeout": 1},
    request_s=0.8,
    free_bytes=int(1.9 * TIB),
    run_tokens=26_110_000,
    active_s=10_000.0,
    servers_up=1,
    servers=1,
)


def test_the_line_people_know() -> None:
    assert format_line(summarise([START, LATER], 1121.0, alive=True)) == (
        "[12880/37312 34.5%] 1.09 samples/s, 2582 tok/s (2611 whole run), req 0.8s, ETA 6h11m, "
        "errors 3 (mismatch 2, timeout 1), 1.18 of 3.43 TiB written, 1.9 TiB free"
    )


def test_nobody_waits_for_the_tokens_of_failed_samples() -> None:
    """A tenth of what is left has failed: it takes a tenth less time."""
    known, left = summarise([START, LATER], 1121.0, alive=True).eta_s, LATER.tokens_of - LATER.tokens
    failed = replace(LATER, failed_tokens=left // 10)
    assert known is not None
    assert summarise([START, failed], 1121.0, alive=True).eta_s == pytest.approx(0.9 * known)
    assert summarise([START, replace(LATER, failed_tokens=left)], 1121.0, alive=True).eta_s == 0.0


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 0, "0 of 0 B"), (512, 1 << 30, "4.77e-07 of 1 GiB"), (3 << 30, 4 << 30, "3 of 4 GiB")],
)
def test_bytes_in_the_unit_of_the_whole(part: int, whole: int, text: str) -> None:
    assert format_share(part, whole) == text


def test_stalled_after_three_times_the_slowest_request() -> None:
    still = replace(LATER, t=1200.0)
    ticks = [START, LATER, still]
    assert summarise(ticks, 1120.0 + 119.0, alive=True).state == "RUNNING"
    stalled = summarise(ticks, 1120.0 + 121.0, alive=True)
    assert stalled.state == "STALLED"
    assert stalled.progress_age_s == pytest.approx(121.0)
    assert ", STALLED" in format_line(stalled)
    quick = [replace(tick, slowest_s=0.1) for tick in ticks]
    assert summarise(quick, 1120.0 + 59.0, alive=True).state == "RUNNING", "a minute of grace for quick requests"
    assert summarise(quick, 1120.0 + 61.0, alive=True).state == "STALLED"


def test_dead_is_asked_of_the_kernel_and_an_end_is_an_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for tick in (START, LATER):
        journal.write(tick)
    assert read_status(tmp_path, now=1121.0).state == "DEAD"
    with RunLock(tmp_path):
        assert read_status(tmp_path, now=1121.0).state == "RUNNING"
    for phase, state in (("interrupted", "INTERRUPTED"), ("failed", "FAILED"), ("finished", "COMPLETE")):
        journal.write(replace(LATER, event="end", phase=phase))
        assert read_status(tmp_path, now=9e9).state == state
    journal.close()


def test_a_look_at_the_lock_refuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` holds the lock for an instant; a build that starts just then tries again."""
    path = tmp_path / ".build/lock"
    path.parent.mkdir()
    look, wait, waits = path.open("a+"), time.sleep, list[float]()
    fcntl.flock(look, fcntl.LOCK_SH)

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        look.close()
        wait(0)

    monkeypatch.setattr(time, "sleep", sleep)
    with RunLock(tmp_path):
        assert len(waits) == 1
        monkeypatch.setattr(runlock, "PATIENCE_S", 0.05)
        with pytest.raises(ConfigError, match="another builder works in"), RunLock(tmp_path):
            pass
        assert len(waits) > 1
