"""The samples of a build: rendered once, kept in its work folder, used again when the inputs are the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eagle3_data import durable
from eagle3_data.builders.pool import FlowConfig
from eagle3_data.builders.samples import prepare_samples
from eagle3_data.builders.samples.files import read_files
from eagle3_data.builders.samples.spec import SampleSpec
from eagle3_data.builders.samples.store import STORE, SampleStore
from eagle3_data.builders.settings import BuildConfig
from eagle3_data.errors import ConfigError
from eagle3_data.hub.digest import file_xxh3
from eagle3_data.runlock import work_folder


def make_folder(out: Path) -> None:
    """Raises ConfigError when `out` cannot be made or written."""
    try:
        work_folder(out).mkdir(parents=True, exist_ok=True)
        probe_file = work_folder(out) / ".write-test"
        probe_file.write_text("")
        probe_file.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write to {out}: {error.strerror}", next="another --out, or other permissions"
        ) from error


def load_store(config: BuildConfig, on_text: Callable[[str], None]) -> SampleStore:
    """Render the inputs, or reuse what an earlier run rendered from the same bytes with the same options.

    Whether the build may go on with other samples than it began with is for its fingerprint to say.

    Raises InputError for inputs that cannot be read, SampleError when nothing in them can be learnt.
    """
    folder = work_folder(config.out)
    path, note = folder / STORE, folder / "inputs.json"
    inputs = describe_inputs(config)
    if path.exists() and note.exists() and json.loads(note.read_text()) == inputs:
        return SampleStore.open(path)
    note.unlink(missing_ok=True)
    report = prepare_samples(
        list(config.inputs),
        config.model,
        config.samples,
        path,
        workers=os.cpu_count() or 1,
        trust_remote_code=config.trust_remote_code,
    )
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(report.dropped.items()))
    on_text(
        f"{report.samples:,} samples from {report.rows:,} rows of {report.form}, "
        f"{100 * report.supervised_share:.0f} % of {report.tokens:,} tokens supervised"
        + (f"; left out: {left_out}" if left_out else "")
    )
    durable.write_text(note, json.dumps(inputs))
    return SampleStore.open(path)


def describe_inputs(config: BuildConfig) -> dict[str, Any]:
    """What rendering depends on, by content where it is a file or a folder of files."""
    files = {name: _content(Path(name)) for name in config.inputs}
    return {"files": files, "model": config.model, "samples": config.samples.to_dict()}


def _content(path: Path) -> str | dict[str, str]:
    """Digest of a file, or of every file that is read in a folder, by its name; empty for the name of a data set."""
    if path.is_file():
        return file_xxh3(path)
    return {str(file.relative_to(path)): file_xxh3(file) for file in read_files(path)} if path.is_dir() else ""


def remember(config: BuildConfig) -> None:
    """Keep the settings in the work folder, without the key, so that `retry DIR` needs no others."""
    make_folder(config.out)
    data = asdict(replace(config, api_key=None, retry_failed=False))
    data["samples"] = config.samples.to_dict()
    durable.write_text(_settings_path(config.out), json.dumps(data, default=str, indent=1) + "\n")


def recall(folder: Path) -> BuildConfig:
    """The settings of the last `build` here. Raises ConfigError when there was none."""
    try:
        data = json.loads(_settings_path(folder).read_text())
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no build of this machine", next="eagle3-data build --help") from None
    data.update(
        out=folder,
        inputs=tuple(data["inputs"]),
        servers=tuple(data["servers"]),
        samples=SampleSpec.from_dict(data["samples"]),
        flow=FlowConfig(**data["flow"]),
        layers=tuple(data["layers"]) if data["layers"] else None,
        part=tuple(data["part"]) if data.get("part") else None,
        spool=Path(data["spool"]) if data["spool"] else None,
    )
    return BuildConfig(**data)


def parts_path(folder: Path) -> Path:
    """Where a build that was dealt to several workers remembers in how many parts."""
    return work_folder(folder) / "parts.json"


def _settings_path(folder: Path) -> Path:
    return work_folder(folder) / "settings.json"
