"""The samples of a build: rendered once, kept in its work folder, used again when the inputs are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_data import durable
from eagle3_data.builders.samples import prepare_samples
from eagle3_data.builders.samples.store import SampleStore
from eagle3_data.builders.sink import file_digest
from eagle3_data.errors import SampleError
from eagle3_data.runlock import work_folder

if TYPE_CHECKING:
    from eagle3_data.builders.build import BuildConfig


def load_store(config: BuildConfig, on_text: Callable[[str], None]) -> SampleStore:
    """Render the inputs, or reuse what an earlier run rendered from the same bytes with the same options.

    Raises InputError for inputs that cannot be read, SampleError when nothing in them can be learnt.
    """
    folder = work_folder(config.out)
    path, note = folder / "samples.arrow", folder / "inputs.json"
    inputs = describe_inputs(config)
    if path.exists() and note.exists() and json.loads(note.read_text()) == inputs:
        return SampleStore.open(path)
    fresh = folder / "samples.new.arrow"
    report = prepare_samples(
        config.inputs, config.model, config.samples, fresh, trust_remote_code=config.trust_remote_code
    )
    store = SampleStore.open(fresh)
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(report.skipped.items()))
    on_text(f"{report.samples:,} samples from {report.conversations:,} conversations" + (f" (left out: {skipped})" if skipped else ""))
    if not len(store):
        raise SampleError(
            "no sample has anything to learn" + (f": {skipped}" if skipped else ""),
            next="eagle3-data samples --show 3 shows what the template and the mask make of the first rows",
        )
    if path.exists() and SampleStore.open(path).digest == store.digest:
        fresh.unlink()
    else:
        fresh.replace(path)  # the fingerprint decides whether the build may go on with them
    durable.write_text(note, json.dumps(inputs))
    return SampleStore.open(path)


def describe_inputs(config: BuildConfig) -> dict[str, Any]:
    """What rendering depends on, by content where it is a file."""
    files = {name: file_digest(Path(name)) if Path(name).is_file() else "" for name in config.inputs}
    return {"files": files, "model": config.model, "samples": config.samples.to_dict()}
