"""What clients can ask: the `eagle3` part of `/server_info`."""

from __future__ import annotations

import contextlib
from importlib.metadata import PackageNotFoundError, version

from eagle3_data.patches.sglang.capture import Capture
from eagle3_data.patches.sglang.refusals import free_bytes
from eagle3_data.patches.sglang.writers import Counters
from eagle3_data.protocol import LAYER_CONVENTION, PROTOCOL_VERSION, CaptureInfo


def capture_info(capture: Capture) -> CaptureInfo:
    """The truth as of now; a value that cannot be had (a spool that has gone) is -1."""
    facts, form = capture.facts, capture.form
    counters = capture.writers.counters if capture.writers is not None else Counters()
    free = -1
    with contextlib.suppress(OSError):
        free = free_bytes(capture.spool)
    return CaptureInfo(
        protocol=PROTOCOL_VERSION,
        plugin_version=_version("eagle3-data"),
        sglang_version=_version("sglang"),
        instance=form.instance,
        path=capture.path.name,
        model_path=facts.model_path,
        layers=form.layers,
        convention=LAYER_CONVENTION,
        norm=form.norm,
        dtype=form.dtype,
        width=form.width,
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
        tp_size=facts.tp_size,
        dp_size=facts.dp_size,
        chunk_tokens=facts.chunk_tokens,
        radix_cache=facts.radix_cache,
        device=facts.device,
        spool=str(capture.spool.resolve()),
        free_bytes=free,
        high_water_bytes=capture.config.high_water_bytes,
        backlog_bytes=counters.backlog_bytes,
        dumps_written=counters.written,
        dumps_failed=counters.failed,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
