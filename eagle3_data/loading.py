"""Where a named data set is kept, and the plain call that loads one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME

from eagle3_data.manifest import MANIFEST
from eagle3_data.registration import NAMESPACE, REGISTRY


def build_home(name: str) -> Path:
    """Default folder of a named data set's build: `$HF_HOME/eagle3_data/{name}`."""
    return Path(HF_HOME) / NAMESPACE / name


def publish_local(name: str, folder: Path) -> Path:
    """Make `load_dataset("eagle3_data/{name}")` find a build that lies elsewhere (a symbolic link in `build_home`)."""
    home, folder = build_home(name), folder.resolve()
    if home.exists() and home.resolve() == folder:
        return home
    if home.exists() and not home.is_symlink():
        return home  # a real build lies there; it is never replaced
    home.parent.mkdir(parents=True, exist_ok=True)
    temporary = home.with_name(f".{name}.{os.getpid()}")
    temporary.symlink_to(folder, target_is_directory=True)
    temporary.replace(home)
    return home


def load_dataset(path: str | os.PathLike[str], name: str | None = None, **options: Any) -> Any:
    """`datasets.load_dataset`, which also takes any build folder or mirror of ours.

    `path`: a registered name (`eagle3_data/kimi_k25_synth`), a build folder, or an fsspec URL of one. `options` go to
    `datasets.load_dataset` (`split`, `streaming`, `columns`, `mirror`, `server`, ...).
    """
    import datasets

    text = os.fspath(path)
    if text in REGISTRY:
        return datasets.load_dataset(text, name, **options)
    if (Path(text) / MANIFEST).exists():
        return datasets.load_dataset(f"{NAMESPACE}/custom", name, data_dir=str(Path(text).resolve()), **options)
    if "://" in text and not text.startswith("hf://datasets/"):
        return datasets.load_dataset(f"{NAMESPACE}/custom", name, mirror=text, **options)
    return datasets.load_dataset(text, name, **options)
