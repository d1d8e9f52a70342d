"""`load_dataset(..., server=...)`: make the data set now, through running servers, into the cache or `data_dir`.

What was made stays when anything goes wrong: the same call goes on from there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_data.builders.build import build
from eagle3_data.builders.settings import BuildConfig
from eagle3_data.builders.stored import make_folder
from eagle3_data.builders.synth import SynthSpec, synthesise
from eagle3_data.cli.progress import RunProgress, say
from eagle3_data.errors import BuildFailed, ConfigError
from eagle3_data.runlock import work_folder

if TYPE_CHECKING:
    from eagle3_data.builders.hf import Eagle3Config
    from eagle3_data.builders.recipe import Recipe


def generate(recipe: Recipe | None, config: Eagle3Config, home: Path) -> Path:
    """Build into `config.data_dir`, else `home`; returns the folder. Raises BuildFailed when it was interrupted."""
    folder = Path(config.data_dir) if config.data_dir else home
    servers = (config.server,) if isinstance(config.server, str) else tuple(config.server or ())
    model = config.model or (recipe.capture.model if recipe else None)
    if model is None:
        raise ConfigError("generation needs the target", next="load_dataset(..., server=..., model='FOLDER or hub id')")
    make_folder(folder)
    inputs = (config.inputs,) if isinstance(config.inputs, str) else tuple(config.inputs or ())
    if not inputs:
        inputs = (str(_answers(recipe, folder, model, servers)),)
    with RunProgress("extract") as bar:
        report = build(
            BuildConfig(
                out=folder,
                inputs=inputs,
                model=model,
                servers=servers,
                dataset=recipe.name if recipe else "custom",
                layers=recipe.capture.layers if recipe else None,
                encoding=config.encoding or "bf16",
                shard_bytes=recipe.shard_bytes if recipe else 1 << 30,
            ),
            on_tick=bar,
            on_text=say,
        )
    if not report.complete:
        raise BuildFailed(f"interrupted; {report.saved:,} samples are kept in {folder}", next="the same call goes on")
    return folder


def _answers(recipe: Recipe | None, folder: Path, model: str, servers: tuple[str, ...]) -> Path:
    """The target's own answers to the prompts that come with the data set."""
    if recipe is None or recipe.prompts is None:
        raise ConfigError("generation needs conversations", next="load_dataset(..., inputs='conversations.jsonl')")
    path = work_folder(folder) / "answers.jsonl"
    answers = synthesise(recipe.prompts, model, SynthSpec(max_new_tokens=256), servers, path)
    if answers.interrupted:
        raise BuildFailed(f"interrupted; {answers.saved} answers are kept in {path}", next="the same call goes on")
    return path
