"""What `eagle3-data status` shows. Without typer, which would be half of the answer's time."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from eagle3_data.hub.notes import deleted_shards
from eagle3_data.status import Status, format_bytes, format_duration, format_line, read_status

answer = Console()
"""Not `progress.answer`: importing bars takes a tenth of this command's time."""
WATCH_S = 2.0
FOLLOW_S = 10.0
MIRROR_S = 60.0
"""A mirror is asked no more often: it counts requests, and changes at commits."""
ENDED = ("COMPLETE", "FAILED", "INTERRUPTED", "DEAD")
EXIT_CODES = {"FAILED": 2, "DEAD": 3, "STALLED": 4}


def show_status(where: str, *, watch: bool = False, follow: bool = False, as_json: bool = False) -> None:
    """Of a folder or a mirror, as the command says; ends the process with its exit code."""
    remote = "://" in where
    status = read_status(where)
    if as_json:
        print(json.dumps(status.to_dict()))
    elif watch:
        from rich.live import Live

        with Live(render(where, status), console=answer, refresh_per_second=4) as live:
            while status.state not in ENDED:
                time.sleep(MIRROR_S if remote else WATCH_S)
                status = read_status(where)
                live.update(render(where, status))
    elif follow:
        print(format_line(status), flush=True)
        while status.state not in ENDED:
            time.sleep(MIRROR_S if remote else FOLLOW_S)
            status = read_status(where)
            print(format_line(status), flush=True)
    else:
        answer.print(render(where, status))
    sys.exit(EXIT_CODES.get(status.state, 0))


def render(where: str, status: Status) -> Table:
    """The whole answer on one screen."""
    table = Table(show_header=False, box=None, highlight=False)
    share = 100 * status.done / status.of if status.of else 100.0
    failed = ", ".join(f"{count:,} {reason}" for reason, count in sorted(status.failed.items())) or "none"
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(status.skipped.items())) or "none"
    retried = ", ".join(f"{count:,} {reason}" for reason, count in sorted(status.retried.items())) or "none"
    rows = {
        "build": where,
        "state": status.state + (f" - {status.note}" if status.note else ""),
        "samples": f"{status.done:,} of {status.of:,} ({share:.1f} %)",
        "tokens": f"{status.tokens:,} of {status.tokens_of:,}",
        "speed": f"{status.tokens_per_s:,.0f} tok/s now, {status.tokens_per_s_whole:,.0f} whole run, "
        f"{status.samples_per_s:.2f} samples/s, request {status.request_s:.1f} s",
        "ETA": format_duration(status.eta_s),
        "errors": failed,
        "retried": retried,
        "left out": skipped,
        "written": f"{format_bytes(status.nbytes)} of {format_bytes(status.nbytes_of)}, "
        f"{format_bytes(status.free_bytes)} free",
        "servers": f"{status.servers_up} of {status.servers} up, {status.inflight} requests in flight",
        "progress": f"last {format_duration(status.progress_age_s)} ago",
    }
    gone = {} if "://" in where else deleted_shards(Path(where))
    if gone:
        rows["removed"] = f"{len(gone):,} shards, which are in {', '.join(sorted(set(gone.values())))}"
    for name, value in rows.items():
        table.add_row(name, value)
    return table
