"""`eagle3-data build` and `retry`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer
from rich.table import Table

from eagle3_data.builders.build import build
from eagle3_data.builders.pool import FlowConfig
from eagle3_data.builders.samples.spec import SampleSpec
from eagle3_data.builders.settings import BuildConfig, BuildReport
from eagle3_data.builders.stored import recall
from eagle3_data.cli.progress import RunProgress, answer, say
from eagle3_data.errors import ConfigError
from eagle3_data.journal import Tick
from eagle3_data.metrics import Metrics
from eagle3_data.sizes import parse_size
from eagle3_data.status import format_bytes


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """'1,29,57' -> (1, 29, 57). Raises ConfigError."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--layers {text!r} is not a list of numbers", next="for example --layers 1,29,57") from None


def parse_inflight(text: str) -> int | Literal["auto"]:
    """'auto' or a number. Raises ConfigError."""
    if text == "auto":
        return "auto"
    if not text.isdigit() or int(text) == 0:
        raise ConfigError(f"--max-inflight {text!r} is neither 'auto' nor a number above 0")
    return int(text)


def parse_part(text: str | None) -> tuple[int, int] | None:
    """'2/8' -> (2, 8). Raises ConfigError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise ConfigError(f"--shards {text!r} is not of the form i/n", next="for example --shards 0/8")
    return int(match[1]), int(match[2])


def build_command(
    inputs: Annotated[list[str], typer.Argument(help="Conversation files: JSONL, JSON or Parquet.")],
    model: Annotated[str, typer.Option(help="The target (folder or hub id): its tokenizer and template are used.")],
    out: Annotated[Path, typer.Option(help="Folder of the build. The same command goes on where it stopped.")],
    server: Annotated[list[str], typer.Option(help="URL of a patched server; repeat for several.")],
    dataset: Annotated[str, typer.Option(help="Name of the data set.")] = "custom",
    layers: Annotated[str | None, typer.Option(help="Aux layers to insist on (outputs), e.g. 1,29,57.")] = None,
    last: Annotated[str, typer.Option(help="Last state: 'hidden', 'topk:K' (K tokens instead), 'none'.")] = "hidden",
    encoding: Annotated[
        str, typer.Option(help="Of the states: 'bf16' (as the model ran), 'fp8', 'bf16-planes' (lossless).")
    ] = "bf16",
    last_encoding: Annotated[str | None, typer.Option(help="Of the last state, when it is to differ.")] = None,
    head: Annotated[
        str | None, typer.Option(help="With --last topk:K: the checkpoint with the target's head [--model].")
    ] = None,
    head_device: Annotated[str, typer.Option(help="Where the top-k is computed: 'cpu', 'cuda:7', ...")] = "cpu",
    shard_size: Annotated[str, typer.Option(help="Largest shard.")] = "1GiB",
    max_tokens: Annotated[int | None, typer.Option(help="Longest sample.")] = None,
    truncation: Annotated[str, typer.Option(help="Longer samples: 'drop', or 'cut' at a turn's end.")] = "drop",
    loss: Annotated[str, typer.Option(help="'all-assistant' or 'last-turn'.")] = "all-assistant",
    thinking: Annotated[str, typer.Option(help="'auto', 'on', 'off' or 'template'.")] = "auto",
    reasoning: Annotated[str, typer.Option(help="Reasoning: in the 'loss', as 'context', or 'drop'.")] = "loss",
    max_inflight: Annotated[
        str, typer.Option(help="Requests in flight per server, or 'auto': as many as raise its throughput.")
    ] = "auto",
    request_timeout: Annotated[float, typer.Option(help="Seconds until a prompt must be answered.")] = 600.0,
    retries: Annotated[int, typer.Option(help="Further attempts for what may pass.")] = 3,
    max_failure_share: Annotated[float, typer.Option(help="Stop when more than this share failed.")] = 0.01,
    matching: Annotated[
        str, typer.Option(help="'identity', or 'token_count' for servers with an older patch.")
    ] = "identity",
    spool: Annotated[
        Path | None, typer.Option(help="Only with --matching token_count: where req_* folders appear.")
    ] = None,
    mirror: Annotated[str | None, typer.Option(help="Push while building: ORG/NAME on the hub, or a URL.")] = None,
    delete_local: Annotated[
        bool, typer.Option("--delete-local", help="Remove shards once the mirror confirmed size and sha256.")
    ] = False,
    scratch: Annotated[
        str | None,
        typer.Option(help="With --delete-local: largest local space for shards, e.g. 200GiB."),
    ] = None,
    shards: Annotated[
        str | None,
        typer.Option(help="'i/n': the i-th of n parts (0 <= i < n), in a folder of its own, e.g. of a Slurm array."),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="'local', or 'ray': dealt to a Ray cluster that sees --out (RAY_ADDRESS names it).")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(help="With --engine ray: parts, each with its share of the servers [one per server].")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The server's API key.", envvar="EAGLE3_DATA_API_KEY", show_default=False)
    ] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve Prometheus metrics on this port.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the tokenizer's own code (Kimi needs it).")] = False,
) -> None:
    """Capture conversations into sealed shards.

    Example: eagle3-data build chats.jsonl --model Qwen/Qwen3-8B --server http://127.0.0.1:30000 --out qwen3-data

    On a Ray cluster: eagle3-data build chats.jsonl --model Qwen/Qwen3-8B --engine ray --server http://node-1:30000
    --server http://node-2:30000 --out /shared/qwen3-data
    """
    config = BuildConfig(
        out=out,
        inputs=tuple(inputs),
        model=model,
        servers=tuple(server),
        dataset=dataset,
        layers=parse_layers(layers),
        last=last,
        encoding=encoding,  # type: ignore[arg-type]
        last_encoding=last_encoding,  # type: ignore[arg-type]
        head=head,
        head_device=head_device,
        shard_bytes=parse_size(shard_size),
        samples=SampleSpec(
            loss=loss,  # type: ignore[arg-type]
            thinking=thinking,  # type: ignore[arg-type]
            reasoning=reasoning,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            truncation=truncation,  # type: ignore[arg-type]
        ),
        flow=FlowConfig(max_inflight=parse_inflight(max_inflight), request_timeout_s=request_timeout, retries=retries),
        max_failure_share=max_failure_share,
        matching=matching,  # type: ignore[arg-type]
        spool=spool,
        api_key=api_key,
        trust_remote_code=trust_remote_code,
        mirror=mirror,
        delete_local=delete_local,
        scratch_bytes=parse_size(scratch) if scratch else None,
        part=parse_part(shards),
        engine=engine,  # type: ignore[arg-type]
        workers=workers,
    )
    run_build(config, metrics_port)


def retry_command(
    folder: Annotated[Path, typer.Argument(help="A build that ended with failed samples.")],
    server: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer does not take `list[str] | None`
        typer.Option(help="Other servers than those of the build."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The server's API key.", envvar="EAGLE3_DATA_API_KEY", show_default=False)
    ] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve Prometheus metrics on this port.")] = None,
) -> None:
    """Try the failed samples of a build again; what is sealed stays as it is.

    Example: eagle3-data retry qwen3-data
    """
    config = replace(recall(folder), retry_failed=True, api_key=api_key)
    run_build(replace(config, servers=tuple(server)) if server else config, metrics_port)


def run_build(config: BuildConfig, metrics_port: int | None = None) -> None:
    """Build with a progress bar, then the report; exit code 130 when it was interrupted."""
    with ExitStack() as stack:
        watchers: list[Callable[[Tick], None]] = []
        if metrics_port is not None:
            watchers.append(stack.enter_context(Metrics(metrics_port)))
        watchers.append(stack.enter_context(RunProgress("extract")))

        def on_tick(tick: Tick) -> None:
            for watcher in watchers:
                watcher(tick)

        report = engine_of(config)(config, on_tick=on_tick, on_text=say)
    print_report(report)
    if not report.complete:
        say("interrupted: everything placed is kept; the same command goes on from here")
        sys.exit(130)


def engine_of(config: BuildConfig) -> Callable[..., BuildReport]:
    """Raises ConfigError when its library is not installed."""
    if config.engine == "local":
        return build
    from eagle3_data.builders.ray_crew import build_on_ray

    return build_on_ray


def print_report(report: BuildReport) -> None:
    failed, skipped = sum(report.failed.values()), sum(report.skipped.values())
    table = Table(show_header=False, box=None)
    rows = {
        "samples": f"{report.planned:,} planned = {report.saved:,} saved + {failed:,} failed + {skipped:,} skipped"
        + ("" if report.complete else f" + {report.planned - report.saved - failed - skipped:,} to do"),
        "this run": f"{report.sent:,} requests sent, {report.resumed:,} samples skipped (already saved)"
        + (f", {report.adopted:,} dumps of an earlier process used" if report.adopted else ""),
        "retried": _counts(report.retried),
        "failed": _counts(report.failed),
        "left out": _counts(report.skipped),
        "tokens": f"{report.tokens:,} at {report.tokens_per_s:,.0f} tok/s",
        "bytes": format_bytes(report.nbytes),
        "folder": str(report.out),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    answer.print(table, highlight=False)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items())) or "none"
