"""`--metrics-port`: the numbers of the journal for Prometheus, while a build runs. Needs the extra `metrics`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from eagle3_data.errors import ConfigError
from eagle3_data.journal import Tick
from eagle3_data.status import summarise

KEPT = 100
"""Ticks that the rates are made from, as in the log line."""


class Metrics:
    """An HTTP endpoint on `port` (0: any free one); call it with each tick. Use as a context manager.

    Raises ConfigError when the port is taken or prometheus-client is not installed.
    """

    def __init__(self, port: int, address: str = "0.0.0.0") -> None:
        try:
            import prometheus_client
        except ImportError:
            raise ConfigError(
                "--metrics-port needs prometheus-client", next="pip install 'eagle3-data[metrics]'"
            ) from None
        self._library: Any = prometheus_client
        self._ticks: deque[Tick] = deque(maxlen=KEPT)
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, address, registry)
        except OSError as error:
            raise ConfigError(f"--metrics-port {port}: {error.strerror}", next="name a free port") from error
        self.port: int = self._server.server_port

    def __call__(self, tick: Tick) -> None:
        self._ticks.append(tick)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Called by the registry at each scrape, in a thread of the server's."""
        from prometheus_client.core import GaugeMetricFamily

        ticks = list(self._ticks)
        if not ticks:
            return
        last, now = ticks[-1], time.time()
        status = summarise(ticks, now, alive=True)
        plain = {
            "samples_done": ("Samples placed and checked.", status.done),
            "samples_planned": ("Samples to extract.", status.of),
            "tokens_done": ("Tokens placed and checked.", status.tokens),
            "tokens_planned": ("Tokens to extract.", status.tokens_of),
            "bytes_written": ("Shard bytes written.", status.nbytes),
            "bytes_planned": ("Shard bytes to write.", status.nbytes_of),
            "tokens_per_second": ("Over the last two minutes.", status.tokens_per_s),
            "tokens_per_second_whole_run": ("All runs of this build together.", status.tokens_per_s_whole),
            "request_seconds": ("Median of the last hundred requests.", status.request_s),
            "requests_in_flight": ("Requests asked for and not settled.", status.inflight),
            "free_bytes": ("Free space where the shards go.", status.free_bytes),
            "servers_up": ("Servers that take work.", status.servers_up),
            "servers": ("Servers of the run.", status.servers),
            "progress_age_seconds": ("Since a sample was settled last.", status.progress_age_s),
            "tick_timestamp_seconds": ("When these numbers were taken.", last.t),
        }
        for name, (text, value) in plain.items():
            yield GaugeMetricFamily(f"eagle3_data_{name}", text, value=value)
        if status.eta_s is not None:
            yield GaugeMetricFamily("eagle3_data_eta_seconds", "From remaining tokens.", value=status.eta_s)
        for name, text, counts in (
            ("samples_failed", "Given up, by reason.", status.failed),
            ("attempts_retried", "Attempts that were repeated, by reason.", status.retried),
            ("samples_skipped", "Conversations that never became samples.", status.skipped),
        ):
            family = GaugeMetricFamily(f"eagle3_data_{name}", text, labels=["reason"])
            for reason, count in counts.items():
                family.add_metric([reason], count)
            yield family
        state = GaugeMetricFamily("eagle3_data_state", "1 for the state the build is in.", labels=["state"])
        state.add_metric([status.state], 1)
        yield state
