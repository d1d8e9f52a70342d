"""`eagle3-data import`, and the part of `export` that writes samples: SpecForge's and speculators' own forms."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from eagle3_data.checkpoint import resolve_checkpoint
from eagle3_data.cli.build import parse_layers
from eagle3_data.cli.progress import console, say
from eagle3_data.errors import ConfigError
from eagle3_data.protocol import default_aux_layers
from eagle3_data.sizes import parse_size
from eagle3_data.status import format_bytes
from eagle3_data.train.foreign_drafts import import_draft, is_draft
from eagle3_data.train.target import TargetInfo, read_final_norm, read_target_info

OptionalPath = Optional[Path]  # noqa: UP045 - typer evaluates annotations on Python 3.10
OptionalText = Optional[str]  # noqa: UP045
STATE_FORMS = ("specforge", "speculators")


def import_command(
    source: Annotated[Path, typer.Argument(help="Folder of a draft, or of state files, of SpecForge or speculators.")],
    target: Annotated[str, typer.Option(help="The target they belong to: folder or hub id.")],
    out: Annotated[Path, typer.Option(help="Folder to write. For states the same command goes on where it stopped.")],
    layers: Annotated[OptionalText, typer.Option(help="Outputs that state files hold. Default: EAGLE-3's.")] = None,
    dataset: Annotated[str, typer.Option(help="Name of the data set.")] = "custom",
    shard_size: Annotated[str, typer.Option(help="Largest shard.")] = "1GiB",
    max_failure_share: Annotated[float, typer.Option(help="Stop when more than this share cannot be read.")] = 0.01,
    draft_config: Annotated[OptionalPath, typer.Option(help="With training_state.pt: the draft's config.json.")] = None,
) -> None:
    """Take over a draft or hidden states of SpecForge or speculators. The form is recognised.

    A draft becomes a checkpoint for export, evaluate and draft.init_from; *.ckpt and hs_*.safetensors become shards.

    Example: eagle3-data import cache/hidden_states --target Qwen/Qwen3-8B --out qwen3-data
    """
    folder = resolve_checkpoint(target)
    info = read_target_info(folder, model=target)
    if is_draft(source):
        found = import_draft(source, out, target=info, draft_config=draft_config)
        spec = found.spec
        say(f"{found.form} draft: aux layers {list(spec.aux_layers)}, {spec.draft_vocab_size:,} draft tokens")
        print(f"next: eagle3-data export {out} --out {out / 'export'}, or train with draft.init_from={out}")
        return
    _import_states(source, out, target, info, layers, dataset, shard_size, max_failure_share)


def _import_states(
    source: Path,
    out: Path,
    target: str,
    info: TargetInfo,
    layers: str | None,
    dataset: str,
    shard_size: str,
    max_failure_share: float,
) -> None:
    from eagle3_data.builders.foreign.run import ImportConfig, import_states
    from eagle3_data.builders.foreign.source import Source, detect, rms_norm
    from eagle3_data.builders.foreign.specforge import SpecForgeFiles
    from eagle3_data.builders.foreign.speculators import SpeculatorsFiles

    files: Source
    if detect(source) == "specforge":
        files = SpecForgeFiles(source)
    else:
        weight = read_final_norm(resolve_checkpoint(target, norm=True), info)
        files = SpeculatorsFiles(source, rms_norm(weight, info.rms_norm_eps))
    config = ImportConfig(
        out=out,
        model=target,
        layers=parse_layers(layers) or default_aux_layers(info.num_layers),
        width=info.hidden_size,
        vocab_size=info.vocab_size,
        context_length=info.max_positions,
        dataset=dataset,
        shard_bytes=parse_size(shard_size),
        max_failure_share=max_failure_share,
    )
    with SampleBar("importing") as bar:
        report = import_states(config, files, on_text=say, on_sample=bar)
    lost = {**report.skipped, **report.failed}
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(lost.items())) or "none"
    print(
        f"{report.saved:,} samples of {report.form}, {report.tokens:,} tokens, {format_bytes(report.nbytes)} in {out}; "
        f"left out: {left_out}"
    )
    print(f"next: eagle3-data verify {out}")


def export_samples(source: Path, out: Path, *, to: str, target: str | None) -> None:
    """The samples of a build as state files of `to`. Raises ConfigError for another form."""
    from eagle3_data.shards import ShardSet
    from eagle3_data.train.foreign_states import export_specforge, export_speculators

    if to not in STATE_FORMS:
        raise ConfigError(f"{source} is a build; --to {to!r} is not one of {', '.join(STATE_FORMS)}")
    data = ShardSet.open(source)
    with SampleBar("exporting") as bar:
        if to == "specforge":
            export_specforge(data, out, on_sample=bar)
        else:
            model = target or data.capture.model
            folder = resolve_checkpoint(model, norm=True)
            weight = read_final_norm(folder, read_target_info(folder, model=model))
            export_speculators(data, out, norm_weight=weight, on_sample=bar)
    print(f"{len(data):,} samples in {to}'s form in {out}")


class SampleBar:
    """A bar on a terminal; elsewhere one line per tenth of the work."""

    def __init__(self, what: str) -> None:
        self.what, self._task, self._tenth = what, TaskID(0), -1
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
        )

    def __enter__(self) -> SampleBar:
        self._task = self._bar.add_task(self.what, total=None)
        if console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if console.is_terminal:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if console.is_terminal:
            self._bar.update(self._task, completed=done, total=total)
        elif done * 10 // total > self._tenth:
            self._tenth = done * 10 // total
            say(f"{self.what}: {done:,} of {total:,} samples")
