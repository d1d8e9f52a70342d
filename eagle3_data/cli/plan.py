"""`eagle3-data plan`: what a build will take, and whether it fits, before any GPU second."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from eagle3_data.capture import CaptureSpec, Encoding, parse_last
from eagle3_data.cli.build import parse_layers
from eagle3_data.cli.progress import answer, say
from eagle3_data.errors import ConfigError
from eagle3_data.protocol import ProtocolError, default_aux_layers
from eagle3_data.registration import NAMESPACE, REGISTRY
from eagle3_data.sizes import parse_size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from eagle3_data.builders.estimate import Estimate


def plan_command(
    samples_file: Annotated[
        Path | None, typer.Argument(help="Prepared samples (.arrow, from eagle3-data samples).")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Instead: number of samples...")] = None,
    tokens: Annotated[int | None, typer.Option(help="... and of tokens, all together.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Take the target of a named data set, e.g. kimi_k25_synth.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Take it from a model's config.json (folder or hub id).")] = None,
    width: Annotated[int | None, typer.Option(help="Or say it: hidden width.")] = None,
    layers: Annotated[str, typer.Option(help="Aux layers (outputs).")] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    last: Annotated[str, typer.Option(help="Last state: 'hidden', 'topk:K' or 'none'.")] = "hidden",
    encoding: Annotated[str, typer.Option(help="Of the states: 'bf16', 'fp8' or 'bf16-planes'.")] = "bf16",
    shard_size: Annotated[str, typer.Option(help="Largest shard.")] = "1GiB",
    speed: Annotated[float | None, typer.Option(help="Prefill speed, tokens per second (measured or guessed).")] = None,
    out: Annotated[Path, typer.Option(help="Where the shards will go: its free space counts.")] = Path("."),
    spool: Annotated[Path | None, typer.Option(help="The server's spool, when it is on this machine.")] = None,
    mirror_quota: Annotated[str | None, typer.Option(help="Space left on the mirror, e.g. 2TB.")] = None,
    upload: Annotated[str | None, typer.Option(help="Upload speed per second, e.g. 100MB.")] = None,
) -> None:
    """Bytes, shards, hours and disk of a build. Exit code 1 when it does not fit, with the option that would.

    Example: eagle3-data plan --dataset kimi_k25_synth --samples 37312 --tokens 87800000 --speed 2582
    """
    from eagle3_data.builders.estimate import Room, describe, estimate, objections, remarks, ways

    top_k = parse_last(last)
    lengths = _lengths(samples_file, samples, tokens)
    spec = _target(dataset, model, width, layers, dtype)
    kind: Encoding = encoding  # type: ignore[assignment]  # checked by the spec
    wanted = replace(
        spec, last=last, aux_encoding=kind, last_encoding=kind if last == "hidden" and not top_k else "bf16"
    )

    def size(way: CaptureSpec) -> Estimate:
        return estimate(
            lengths,
            way,
            shard_bytes=parse_size(shard_size),
            tokens_per_s=speed,
            upload_bytes_per_s=float(parse_size(upload)) if upload else None,
        )

    chosen, others = size(wanted), [size(way) for way in ways(spec) if way != wanted]
    table = Table(box=None)
    table.add_column("")
    table.add_column(f"{chosen.option} (chosen)")
    for row in describe(chosen).items():
        table.add_row(*row)
    answer.print(table, highlight=False)
    table = Table("or", "B/token", "shards", "upload", box=None)
    for one in others:
        rows = describe(one)
        table.add_row(one.option, f"{one.bytes_per_token:,.0f}", rows["shards"], rows.get("upload", "-"))
    answer.print(table, highlight=False)
    for remark in remarks(chosen):
        say(f"note: {remark}")
    room = Room(
        disk_bytes=_free(out),
        spool_bytes=_free(spool) if spool else None,
        mirror_bytes=parse_size(mirror_quota) if mirror_quota else None,
    )
    problems = objections(chosen, others, room)
    for problem in problems:
        say(f"does not fit - {problem}")
    sys.exit(1 if problems else 0)


def _lengths(path: Path | None, samples: int | None, tokens: int | None) -> npt.NDArray[np.int32]:
    from eagle3_data.builders.estimate import story_lengths
    from eagle3_data.builders.samples.store import SampleStore

    if path is not None:
        return SampleStore.open(path).tokens
    if not samples or not tokens or samples <= 0 or tokens < samples:
        raise ConfigError("give prepared samples, or --samples and --tokens", next="eagle3-data plan --help")
    return story_lengths(samples, tokens)


def _target(dataset: str | None, model: str | None, width: int | None, layers: str, dtype: str) -> CaptureSpec:
    """The capture spec from the one of three sources that was given."""
    chosen = parse_layers(layers or None)
    if dataset is not None:
        return _recipe_capture(dataset)
    if model is not None:
        info = _config(model)
        try:
            wanted = chosen or default_aux_layers(int(info["num_hidden_layers"]))
            return CaptureSpec(model=model, layers=wanted, width=int(info["hidden_size"]), dtype=dtype)
        except (KeyError, ProtocolError) as error:
            raise ConfigError(f"{model}: {error}", next="say --width and --layers") from error
    if width is not None:
        return CaptureSpec(model="?", layers=chosen or (0, 1, 2), width=width, dtype=dtype)
    raise ConfigError("which target? give --dataset, --model or --width", next="eagle3-data plan --help")


def _recipe_capture(dataset: str) -> CaptureSpec:
    import importlib

    name = f"{NAMESPACE}/{dataset.removeprefix(f'{NAMESPACE}/')}"
    recipe = getattr(importlib.import_module(REGISTRY[name]), "RECIPE", None) if name in REGISTRY else None
    if recipe is None:
        raise ConfigError(f"no recipe {dataset!r}; known: kimi_k25_synth, smollm2_demo")
    capture: CaptureSpec = recipe.capture
    return capture


def _config(model: str) -> dict[str, Any]:
    """config.json of a folder or hub id, text part."""
    from huggingface_hub import hf_hub_download

    folder = Path(model)
    try:
        path = folder / "config.json" if folder.is_dir() else Path(hf_hub_download(model, "config.json"))
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"no config.json of {model}: {error}", next="--width and --layers say the same") from error
    text: dict[str, Any] = config.get("text_config", config)
    return text


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.resolve().parent
    return shutil.disk_usage(folder).free
