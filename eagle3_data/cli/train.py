"""`eagle3-data train`, `export` and `evaluate`, and the entry point of `accelerate launch -m eagle3_data.train`."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, get_args

import typer
import yaml
from rich.console import Console
from rich.table import Table

from eagle3_data.cli.cache import ShardCache, ShardCacheSize
from eagle3_data.cli.exchange import export_samples
from eagle3_data.errors import ConfigError, Eagle3Error
from eagle3_data.manifest import MANIFEST, Manifest
from eagle3_data.train.config import TrainConfig, override, parse_config, read_yaml, to_yaml
from eagle3_data.train.presets import PRESETS, preset_values

if TYPE_CHECKING:
    from eagle3_data.train.loader import Samples

console = Console()
OptionalPath = Optional[Path]  # noqa: UP045 - typer evaluates annotations on Python 3.10
OptionalText = Optional[str]  # noqa: UP045
OptionalInt = Optional[int]  # noqa: UP045
OptionalFloat = Optional[float]  # noqa: UP045


def train_command(
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Single settings, over file and preset."),
    ] = None,
    data: Annotated[OptionalPath, typer.Option(help="Folder of a build, or a mirror: org/name or a URL.")] = None,
    out: Annotated[OptionalPath, typer.Option(help="Run folder; an interrupted run in it is continued.")] = None,
    target: Annotated[OptionalText, typer.Option(help="The target; default: the model the data names.")] = None,
    config: Annotated[OptionalPath, typer.Option(help="YAML file with all settings.")] = None,
    preset: Annotated[OptionalText, typer.Option(help=f"Start from: {', '.join(sorted(PRESETS))}.")] = None,
    minutes: Annotated[OptionalFloat, typer.Option(help="Stop after this much training time.")] = None,
    server: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Patched server: samples that the build lacks are captured when training needs them."),
    ] = None,
    shard_cache: ShardCache = None,
    shard_cache_size: ShardCacheSize = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print all settings and stop.")] = False,
) -> None:
    """Train an EAGLE-3 draft on a build, on one device.

    On several: accelerate launch -m eagle3_data.train --config run.yaml (same options).

    Example: eagle3-data train --data kimi-data --target moonshotai/Kimi-K2.5 --out run --preset kimi_k25_synth
    """
    if print_config:
        # a schema to fill in needs no folders yet
        data, out = data or (Path("DATA") if config is None else None), out or (Path("RUN") if config is None else None)
    settings = gather(
        config=config,
        preset=preset,
        data=data,
        out=out,
        target=target,
        minutes=minutes,
        shard_cache=shard_cache,
        shard_cache_size=shard_cache_size,
        assignments=set_ or [],
    )
    if print_config:
        print(to_yaml(settings) + memory_note(settings), end="")
        return
    _train(settings, tuple(server or ()))


def gather(
    *,
    config: Path | None,
    preset: str | None,
    data: Path | None,
    out: Path | None,
    target: str | None,
    minutes: float | None,
    assignments: list[str],
    shard_cache: Path | None = None,
    shard_cache_size: str | None = None,
) -> TrainConfig:
    """One configuration out of file, preset and options; later ones win in this order: preset, file, options."""
    values: dict[str, Any] = {"data": {}, "run": {}}
    if preset is not None:
        values = preset_values(preset, folder=data or Path("data"), output=out or Path("run"))
    if config is not None:
        for section, fields in read_yaml(config).items():
            values.setdefault(section, {}).update(fields)
    if data is not None:
        values["data"]["folder"] = str(data)
    if out is not None:
        values["run"]["output"] = str(out)
    if target is not None:
        values.setdefault("target", {})["model"] = target
    if minutes is not None:
        values.setdefault("optim", {})["max_minutes"] = minutes
    if shard_cache is not None:
        values["data"]["shard_cache"] = str(shard_cache)
    if shard_cache_size is not None:
        values["data"]["shard_cache_size"] = shard_cache_size
    values = override(values, assignments)
    missing = [f"--{name}" for name, section, field in _REQUIRED if field not in values[section]]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} missing", next="give them, or a file with --config")
    return parse_config(values, source=str(config) if config else "the options")


_REQUIRED = (("data", "data", "folder"), ("out", "run", "output"))


def memory_note(settings: TrainConfig) -> str:
    """What reading ahead may take at most, as a comment; known once the data's width is."""
    slots, positions = settings.batch.prefetch_batches + 1, settings.batch.micro_batch_tokens
    if not (settings.data.folder / MANIFEST).exists():
        return f"# host memory to read ahead, per rank: {slots * positions:,} positions at most\n"
    from eagle3_data.train.loader import position_bytes

    each = position_bytes(Manifest.load(settings.data.folder).spec)
    return (
        f"# host memory to read ahead, per rank: {slots * positions * each:,} bytes at most ({each:,} per position)\n"
    )


def open_samples(
    folder: Path, servers: tuple[str, ...], shard_cache: Path | None = None, shard_cache_size: str | None = None
) -> contextlib.AbstractContextManager[Samples]:
    """The samples of a build folder or of a mirror; with servers those, too, that are still to be captured."""
    from eagle3_data.shards import ShardSet
    from eagle3_data.shards.remote import open_samples as open_stored

    if servers:
        from eagle3_data.builders.live_ranks import Ranks, open_live
        from eagle3_data.builders.stored import recall

        return open_live(replace(recall(folder), servers=servers), Ranks.of_environment(), on_text=say)
    local = (folder / MANIFEST).exists() or folder.is_absolute() or folder.is_dir()
    if local and not (folder / MANIFEST).exists():
        ShardSet.open(folder)  # raises: says what a build is
    where = str(folder) if local else mirror_of(folder)
    samples = open_stored(where, shard_cache=shard_cache, shard_cache_size=shard_cache_size)
    if isinstance(samples, ShardSet) and samples.remote:
        say(samples.check_far())
    return contextlib.nullcontext(samples)


def mirror_of(folder: Path) -> str:
    """`hf:/org/name`, as a path keeps it, back to a URL; `org/name` stays."""
    text = str(folder)
    scheme, colon, rest = text.partition(":/")
    if not colon:
        return text
    return f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"


def _train(settings: TrainConfig, servers: tuple[str, ...]) -> None:
    from eagle3_data.train.trainer import Trainer

    data = settings.data
    with open_samples(data.folder, servers, data.shard_cache, data.shard_cache_size) as samples:
        trainer = Trainer(settings, samples)
        report = trainer.run()
    if not trainer.accelerator.is_main_process:
        return
    table = Table(title=f"{report.stopped} after {report.state.step:,} steps", show_header=False)
    table.add_row("trained tokens", f"{report.state.tokens:,}")
    if report.state.first_loss is not None and report.state.last_loss is not None:
        table.add_row("loss", f"{report.state.first_loss:.3f} -> {report.state.last_loss:.3f}")
    table.add_row("acceptance length", f"{report.state.best_acceptance:.2f} (simulated, held out, best)")
    if report.state.skipped_steps:
        table.add_row("skipped steps", f"{report.state.skipped_steps:,}")
    table.add_row("checkpoint", str(report.checkpoint))
    console.print(table, highlight=False)
    print(f"next: eagle3-data export {report.output} --out {report.output / 'export'}")


def export_command(
    source: Annotated[Path, typer.Argument(help="Run folder (its best checkpoint), one checkpoint, or a build.")],
    out: Annotated[OptionalPath, typer.Option(help="Folder to write. Default: SOURCE/export.")] = None,
    to: Annotated[str, typer.Option(help="sglang or vllm; for a build specforge or speculators.")] = "sglang",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    target: Annotated[OptionalText, typer.Option(help="The target's name where it will be served.")] = None,
    draft_tokens: Annotated[int, typer.Option(help="Draft tokens per step, in the printed command.")] = 3,
    engine_version: Annotated[OptionalText, typer.Option(help="Of the engine that will serve it, e.g. 0.5.23.")] = None,
) -> None:
    """Write a trained draft as SGLang or vLLM load it, checked for what the engine would reject.

    Of a build: its samples in SpecForge's or speculators' form, for their trainers.

    Example: eagle3-data export run --to vllm --out kimi-k2.5-eagle3
    """
    from eagle3_data.train.engines import Engine
    from eagle3_data.train.export import DTYPES, export_draft

    if (source / MANIFEST).exists():
        export_samples(source, out or source / "export", to=to, target=target)
        return
    if to not in get_args(Engine):
        raise ConfigError(f"--to {to!r} is not one of {', '.join(get_args(Engine))}")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    result = export_draft(
        source,
        out or source / "export",
        engine=to,  # type: ignore[arg-type]
        dtype=dtype,  # type: ignore[arg-type]
        target=target,
        draft_tokens=draft_tokens,
        version=engine_version,
    )
    for finding in result.warnings:
        console.print(str(finding), highlight=False, markup=False)
    print(f"exported to {result.folder}; serve it with:\n  {result.command}")


def say(text: str) -> None:
    print(text, flush=True)


def run_module() -> int:
    """`python -m eagle3_data.train`: the train command, with its errors as one message and exit code 1."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(train_command)
    try:
        app(standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        return 130
    except (Eagle3Error, yaml.YAMLError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if hasattr(error, "format_message"):  # click's usage errors, whichever click typer ships
            print(f"error: {error.format_message()}", file=sys.stderr)
            return 2
        raise
    return 0
