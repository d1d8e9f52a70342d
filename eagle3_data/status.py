"""The quick progress check: what a build has done and whether it is alive, from the journal's tail alone."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3_data import runlock
from eagle3_data.errors import ConfigError
from eagle3_data.journal import Tick, journal_path, read_tail

if TYPE_CHECKING:
    from eagle3_data.manifest import Manifest

State = Literal["RUNNING", "STALLED", "DEAD", "INTERRUPTED", "FAILED", "COMPLETE", "PARTIAL"]
WINDOW_S = 120.0
STALL_FLOOR_S = 60.0
"""A run is not called stalled sooner than this, however fast its requests are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Rates are tokens and samples per second; sizes bytes; ages and ETA seconds."""

    state: State
    phase: str
    done: int
    of: int
    tokens: int
    tokens_of: int
    nbytes: int
    nbytes_of: int
    failed: dict[str, int]
    retried: dict[str, int]
    skipped: dict[str, int]
    samples_per_s: float
    tokens_per_s: float
    tokens_per_s_whole: float
    request_s: float
    eta_s: float | None
    free_bytes: int
    inflight: int
    servers_up: int
    servers: int
    progress_age_s: float
    note: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_status(where: Path | str, now: float | None = None) -> Status:
    """Of a folder, or of a mirror's URL. Raises ConfigError when it holds neither a journal nor a manifest."""
    now = time.time() if now is None else now
    if isinstance(where, str) and "://" in where:
        return _from_manifest(_mirrored(where), "what the mirror has; whether its builder lives, only its folder tells")
    folder = Path(where)
    ticks = read_tail(journal_path(folder))
    if not ticks:
        from eagle3_data.manifest import MANIFEST, Manifest  # pydantic: half of the time that `status` takes

        if not (folder / MANIFEST).exists():
            raise ConfigError(f"{folder} holds no build", next="eagle3-data build --help")
        return _from_manifest(Manifest.load(folder), "read from the manifest; the run's journal is not here")
    return summarise(ticks, now, alive=runlock.is_held(folder))


def summarise(ticks: list[Tick], now: float, *, alive: bool) -> Status:
    """Status from ticks, oldest first; `alive`: a builder holds the lock."""
    last = ticks[-1]
    started = max((i for i, tick in enumerate(ticks) if tick.event == "start"), default=0)
    run = ticks[started:]
    window = [tick for tick in run if tick.t >= last.t - WINDOW_S]
    first = window[0] if len(window) > 1 else run[0]
    seconds = max(last.t - first.t, 1e-9)
    rate = (last.tokens - first.tokens) / seconds if last.t > first.t else 0.0
    whole = last.run_tokens / last.active_s if last.active_s > 0 else 0.0
    moved = next(
        (a.t for a, b in zip(reversed(run[1:]), reversed(run[:-1]), strict=True) if a.settled != b.settled), run[0].t
    )
    age = max(0.0, now - (last.t if last.event == "end" else moved))
    left = last.tokens_of - last.tokens - last.failed_tokens
    speed = rate or whole
    return Status(
        state=_state(last, age, alive),
        phase=last.phase,
        done=last.done,
        of=last.of,
        tokens=last.tokens,
        tokens_of=last.tokens_of,
        nbytes=last.nbytes,
        nbytes_of=last.nbytes_of,
        failed=last.failed,
        retried=last.retried,
        skipped=last.skipped,
        samples_per_s=(last.done - first.done) / seconds if last.t > first.t else 0.0,
        tokens_per_s=rate,
        tokens_per_s_whole=whole,
        request_s=last.request_s,
        eta_s=left / speed if speed > 0 and last.event != "end" else None,
        free_bytes=last.free_bytes,
        inflight=last.inflight,
        servers_up=last.servers_up,
        servers=last.servers,
        progress_age_s=age,
        note=last.note,
    )


def _state(last: Tick, age: float, alive: bool) -> State:
    if last.event == "end":
        return {"finished": "COMPLETE", "interrupted": "INTERRUPTED"}.get(last.phase, "FAILED")  # type: ignore[return-value]
    if not alive:
        return "DEAD"
    stalled = last.phase == "extract" and age > max(STALL_FLOOR_S, 3 * last.slowest_s)
    return "STALLED" if stalled else "RUNNING"


def _mirrored(url: str) -> Manifest:
    from eagle3_data.hub.mirror import find_manifest, make_mirror
    from eagle3_data.patience import Patience

    mirror = make_mirror(url, Patience())
    try:
        mirror.open(create=False)
        manifest = find_manifest(mirror)
    finally:
        mirror.close()
    if manifest is None:
        raise ConfigError(f"{mirror.url} holds no build", next=f"eagle3-data push FOLDER {mirror.url}")
    return manifest


def _from_manifest(manifest: Manifest, note: str) -> Status:
    """A mirror or a folder whose work files are gone: what is sealed is what is known."""
    plan = manifest.plan
    return Status(
        state="COMPLETE" if manifest.state == "complete" else "PARTIAL",
        phase="finished" if manifest.state == "complete" else "unknown",
        done=manifest.saved,
        of=plan.samples,
        tokens=manifest.tokens,
        tokens_of=plan.tokens,
        nbytes=manifest.nbytes,
        nbytes_of=plan.nbytes,
        failed=manifest.failed,
        retried={},
        skipped=plan.skipped,
        samples_per_s=0.0,
        tokens_per_s=0.0,
        tokens_per_s_whole=0.0,
        request_s=0.0,
        eta_s=None,
        free_bytes=0,
        inflight=0,
        servers_up=0,
        servers=0,
        progress_age_s=0.0,
        note=note,
    )


def format_bytes(count: float) -> str:
    """Binary units, three figures: 3.43 TiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    unit = 0
    while abs(count) >= 1024 and unit < len(units) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {units[unit]}" if unit == 0 else f"{count:.3g} {units[unit]}"


def format_share(part: float, whole: float) -> str:
    """'1.18 of 3.43 TiB': both in the unit of the whole."""
    total, unit = format_bytes(whole).split(" ")
    scale = float(whole) / float(total) if float(total) else 1.0
    return f"{part / scale:.3g} of {total} {unit}"


def format_duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def format_line(status: Status) -> str:
    """The log line people know, telling the truth: the total is the real total, bytes are what was written."""
    share = 100 * status.done / status.of if status.of else 100.0
    errors = sum(status.failed.values())
    detail = ", ".join(f"{reason} {count}" for reason, count in sorted(status.failed.items()))
    parts = [
        f"[{status.done}/{status.of} {share:.1f}%] {status.samples_per_s:.2f} samples/s",
        f"{status.tokens_per_s:.0f} tok/s ({status.tokens_per_s_whole:.0f} whole run)",
        f"req {status.request_s:.1f}s",
        f"ETA {format_duration(status.eta_s)}",
        f"errors {errors}" + (f" ({detail})" if detail else ""),
    ]
    if retried := sum(status.retried.values()):
        parts.append(f"retried {retried}")
    parts.append(f"{format_share(status.nbytes, status.nbytes_of)} written")
    parts.append(f"{format_bytes(status.free_bytes)} free")
    if status.state != "RUNNING":
        parts.append(status.state + (f": {status.note}" if status.note else ""))
    elif status.note:
        parts.append(status.note)
    return ", ".join(parts)
