"""`eagle3-data serve` and `eagle3-data doctor`."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Optional, get_args

import typer
from rich.console import Console
from rich.table import Table

from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import ConfigError
from eagle3_data.protocol import CaptureInfo
from eagle3_data.server.doctor import Diagnosis, diagnose
from eagle3_data.server.process import Device, ServerConfig, ServerProcess

DEFAULT_SPOOL = Path("/dev/shm/eagle3-spool")
LINE_S = 15.0
"""Without a terminal, one line of progress per this many seconds."""

console = Console()


def serve_command(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="The target: folder or hub id.")],
    tp: Annotated[int, typer.Option(help="GPUs for tensor parallelism.")] = 1,
    layers: Annotated[
        Optional[str],  # noqa: UP045 - typer reads this on Python 3.10
        typer.Option(help="Aux layers as outputs, e.g. 1,29,57. Default: 1, n//2-1, n-4."),
    ] = None,
    spool: Annotated[Path, typer.Option(help="Folder for dumps: a large tmpfs or NVMe.")] = DEFAULT_SPOOL,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 30000,
    dtype: Annotated[str, typer.Option(help="SGLang's --dtype: auto, bfloat16, float16, float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    python: Annotated[str, typer.Option(help="Interpreter that has SGLang and eagle3-data.")] = sys.executable,
    api_key: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Clients must give this key.", envvar="EAGLE3_DATA_API_KEY", show_default=False),
    ] = None,
    log: Annotated[Path, typer.Option(help="Where SGLang's own output goes.")] = Path("sglang.log"),
    start_timeout: Annotated[float, typer.Option(help="Seconds until the server must be up.")] = 3600.0,
) -> None:
    """Start an SGLang server that captures, prove that it does, and keep it until Ctrl-C.

    What follows `--` goes to SGLang as it is. The server ends with this command, however that ends.

    Example: eagle3-data serve --model moonshotai/Kimi-K2.5 --tp 8 --spool /mnt/spool -- --trust-remote-code
    """
    if device not in get_args(Device):
        raise ConfigError(f"--device {device!r} is not one of {', '.join(get_args(Device))}")
    config = ServerConfig(
        model=model,
        spool=spool,
        layers=_layers(layers),
        host=host,
        port=port,
        tp=tp,
        device=device,  # type: ignore[arg-type]
        dtype=dtype,
        api_key=api_key,
        extra_args=tuple(context.args),
        python=python,
    )
    signal.signal(signal.SIGTERM, _as_interrupt)
    console.print(f"starting SGLang with {model}; its output is in {log}", highlight=False)
    progress = _Progress()
    with ServerProcess(config, log=log, start_timeout_s=start_timeout, on_progress=progress) as server:
        progress.clear()
        diagnosis = asyncio.run(diagnose(server.url, api_key=api_key))
        _show_checks(diagnosis)
        diagnosis.raise_if_unfit()
        _show_capture(diagnosis.infos[0], server.url)
        console.print("ready; Ctrl-C ends it", highlight=False)
        try:
            while True:
                time.sleep(1.0)
                server.check_alive()
        except KeyboardInterrupt:
            console.print("ending SGLang", highlight=False)


def doctor_command(
    url: Annotated[str, typer.Argument(help="The server, e.g. http://127.0.0.1:30000.")],
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Also check that it serves this model, with its widths and layers."),
    ] = None,
    layers: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Also check that it captures exactly these outputs, e.g. 1,29,57."),
    ] = None,
    api_key: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="The server's API key.", envvar="EAGLE3_DATA_API_KEY", show_default=False),
    ] = None,
    canary: Annotated[bool, typer.Option(help="Have two prompts captured and compare their dumps.")] = True,
) -> None:
    """Check that a server captures what a build needs: one line per check, and what to do where one fails.

    Example: eagle3-data doctor http://127.0.0.1:30000 --layers 1,29,57
    """
    diagnosis = asyncio.run(_diagnose(url, model, _layers(layers), api_key, canary))
    _show_checks(diagnosis)
    if diagnosis.infos:
        _show_capture(diagnosis.infos[0], diagnosis.url)
    diagnosis.raise_if_unfit()


async def _diagnose(
    url: str, model: str | None, layers: Sequence[int] | None, api_key: str | None, canary: bool
) -> Diagnosis:
    """With a model or layers to insist on, what the server says of itself fills in the rest."""
    if model is None and layers is None:
        return await diagnose(url, api_key=api_key, canary=canary)
    first = await diagnose(url, api_key=api_key, canary=False)
    if not first.infos:
        return first
    info = first.infos[0]
    expected = CaptureSpec(
        model=model or info.model_path,
        layers=tuple(layers or info.layers),
        width=info.width,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
    )
    return await diagnose(url, expected, api_key=api_key, canary=canary)


def _layers(text: str | None) -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in text.split(",")) if text else None
    except ValueError:
        raise ConfigError(f"--layers {text!r} is not a list of numbers", next="for example --layers 1,29,57") from None


def _as_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Progress:
    """One line while SGLang loads: rewritten on a terminal, now and then elsewhere."""

    def __init__(self) -> None:
        self._shown = 0.0

    def __call__(self, seconds: float, line: str) -> None:
        text = f"loading, {seconds:.0f} s: {line}"
        if console.is_terminal:
            sys.stdout.write(f"\r\x1b[2K{text[: console.width - 1]}")
            sys.stdout.flush()
        elif seconds - self._shown >= LINE_S:
            self._shown = seconds
            print(text[:200], flush=True)

    def clear(self) -> None:
        if console.is_terminal:
            sys.stdout.write("\r\x1b[2K")


def _show_checks(diagnosis: Diagnosis) -> None:
    table = Table("check", "", "found", "next", title=diagnosis.url, title_justify="left")
    for check in diagnosis.checks:
        table.add_row(check.name, "ok" if check.ok else "FAILED", check.detail, check.next)
    console.print(table, highlight=False, markup=False)


def _show_capture(info: CaptureInfo, url: str) -> None:
    table = Table("captured", "", title=f"what {url} captures", title_justify="left")
    rows = {
        "model": info.model_path,
        "path": f"{info.path} (SGLang {info.sglang_version}, eagle3-data {info.plugin_version})",
        "aux layers": f"{', '.join(map(str, info.layers))} ({info.convention})",
        "last state": "after the final norm" if info.norm == "post" else info.norm,
        "states": f"{info.dtype}, {info.width} wide",
        "longest prompt": f"{info.context_length:,} tokens",
        "chunk": f"{info.chunk_tokens:,} tokens" if info.chunk_tokens > 0 else "off",
        "parallel": f"tp {info.tp_size}, dp {info.dp_size}, {info.device}",
        "spool": f"{info.spool} ({info.free_bytes / 2**30:.1f} GiB free)",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table, highlight=False, markup=False)
