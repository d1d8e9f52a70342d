"""The Prometheus endpoint says what the journal says."""

from __future__ import annotations

import time
import urllib.request

import pytest

from eagle3_data.errors import ConfigError
from eagle3_data.journal import Event, Tick

pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")

from eagle3_data.metrics import Metrics


def tick(done: int, t: float, event: Event = "tick") -> Tick:
    return Tick(
        event=event,
        t=t,
        phase="extract",
        done=done,
        of=100,
        tokens=done * 10,
        tokens_of=1000,
        nbytes=done * 512,
        nbytes_of=51200,
        failed={"mismatch": 2, "timeout": 1},
        servers_up=1,
        servers=2,
        active_s=10.0,
        run_tokens=done * 10,
    )


def scrape(port: int) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


def test_the_endpoint_has_the_journals_numbers() -> None:
    now = time.time()
    with Metrics(0, "127.0.0.1") as metrics:
        assert not [name for name in scrape(metrics.port) if "samples" in name], "nothing is said before the first tick"
        metrics(tick(0, now - 10, "start"))
        metrics(tick(40, now))
        found = scrape(metrics.port)
        assert found["eagle3_data_samples_done"] == 40
        assert found["eagle3_data_samples_planned"] == 100
        assert found["eagle3_data_tokens_per_second"] == pytest.approx(40)
        assert found["eagle3_data_eta_seconds"] == pytest.approx(15)
        assert found['eagle3_data_samples_failed{reason="mismatch"}'] == 2
        assert found['eagle3_data_state{state="RUNNING"}'] == 1
        metrics(tick(60, now + 1))
        assert scrape(metrics.port)["eagle3_data_samples_done"] == 60
        with pytest.raises(ConfigError, match="--metrics-port"):
            Metrics(metrics.port, "127.0.0.1")
