"""A build with a mirror beside it: sealed shards are pushed while the next ones are captured."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from eagle3_data.builders.plan import allocated
from eagle3_data.builders.settings import BuildConfig, BuildReport
from eagle3_data.hub.beside import PushBeside
from eagle3_data.hub.push import PushConfig

SCRATCH_SHARE = 0.8
"""Of the free disk and the shards here, when --scratch says nothing."""


def build_beside(
    config: BuildConfig, work: Callable[[PushBeside], BuildReport], on_text: Callable[[str], None]
) -> BuildReport:
    """`work` with the mirror open. A mirror that fails leaves the build whole: what to do next is said, not raised."""
    assert config.mirror is not None
    scratch = config.scratch_bytes
    if config.delete_local and scratch is None:
        mine = allocated(config.out / "data", "*")  # what an earlier run left here is part of the scratch
        scratch = int(SCRATCH_SHARE * (shutil.disk_usage(config.out).free + mine))
    beside = PushBeside(
        config.out,
        config.mirror,
        PushConfig(delete_local=config.delete_local),
        scratch_bytes=scratch,
        on_text=on_text,
    )
    with beside:
        report = work(beside)
        if not report.complete:
            beside.stop()
        else:
            on_text("mirror: sending what is left")
    _tell(config, beside, on_text)
    return report


def _tell(config: BuildConfig, beside: PushBeside, on_text: Callable[[str], None]) -> None:
    pushed = beside.report
    on_text(f"mirror: {pushed.published:,} of {pushed.of:,} shards published in {pushed.commits:,} commits")
    for problem in pushed.problems:
        on_text(f"mirror: {problem}")
    if beside.error is not None:
        on_text(f"mirror: {beside.error.message}\n  next: eagle3-data push {config.out} {config.mirror}")
