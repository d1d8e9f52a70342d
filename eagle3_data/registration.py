"""`load_dataset("eagle3_data/<name>")` for our names, in every process that imported eagle3_data.

`datasets` has no plugins, so `datasets.load.dataset_module_factory` is wrapped: for our ids it returns the module of
our builder, for all others it is the original. Nothing else of `datasets` is touched; `hf://datasets/<id>` still means
the hub, an absolute path still means that folder. If `datasets` is not imported yet, a meta-path finder wraps it when
it is (or is reloaded), so that `import eagle3_data` stays light.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from eagle3_data import __version__

NAMESPACE = "eagle3_data"
REGISTRY = {
    f"{NAMESPACE}/kimi_k25_synth": "eagle3_data.builders.datasets.kimi_k25_synth",
    f"{NAMESPACE}/smollm2_demo": "eagle3_data.builders.datasets.smollm2_demo",
    f"{NAMESPACE}/custom": "eagle3_data.builders.datasets.custom",
}
"""Data set id -> module with exactly one DatasetBuilder. Adding a data set is a line here and a small module."""

SUPPORTED = ">=4.8,<6"
_TARGET = "datasets.load"
_HOLDERS = ("datasets.load", "datasets.inspect", "datasets.commands.test")
_original: Callable[..., Any] | None = None


def dataset_module_factory(path: str, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `datasets.load.dataset_module_factory`; module-level, so that it pickles by name."""
    if path in REGISTRY:
        check_version()
        from datasets.load import DatasetModule

        options = {"dataset_name": path.split("/")[1]}
        if kwargs.get("revision") is not None:
            options["revision"] = str(kwargs["revision"])  # of the mirror
        return DatasetModule(REGISTRY[path], f"eagle3-data-{__version__}", options)
    if path.startswith(f"{NAMESPACE}/"):
        from eagle3_data.errors import DatasetUnavailable

        raise DatasetUnavailable(
            f"no data set {path!r}; this package knows {', '.join(sorted(REGISTRY))}",
            next=f"check the spelling; for a hub repository of that name: load_dataset('hf://datasets/{path}')",
        )
    return _call_original(path, *args, **kwargs)


def check_version() -> None:
    """Raises ConfigError on a `datasets` outside SUPPORTED; asked only for our names, so others go on working."""
    from importlib.metadata import version

    found = version("datasets")
    if not (4, 8) <= tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < (6, 0):
        from eagle3_data.errors import ConfigError

        raise ConfigError(
            f"datasets {found} is not supported; eagle3-data works with datasets {SUPPORTED}",
            next=f"pip install 'datasets{SUPPORTED}', or read without it: eagle3_data.shards.open_samples(folder)",
        )


def _call_original(path: str, *args: Any, **kwargs: Any) -> Any:
    if _original is None:
        raise RuntimeError("datasets is not wrapped yet")
    return _original(path, *args, **kwargs)


def register() -> None:
    """Wrap now if `datasets` is loaded, else when it is. Safe to call again."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    loaded = sys.modules.get(_TARGET)
    if loaded is not None and hasattr(loaded, "load_dataset"):
        _wrap(loaded)


def _wrap(module: ModuleType) -> None:
    """Raises ImportError when this version of `datasets` has no such function."""
    global _original
    found = getattr(module, "dataset_module_factory", None)
    if found is dataset_module_factory:
        return
    if found is None:
        from importlib.metadata import version

        raise ImportError(
            f"datasets {version('datasets')} has no dataset_module_factory; eagle3-data works with datasets "
            f"{SUPPORTED}. Use eagle3_data.shards.open_samples(folder) meanwhile"
        )
    _original = found
    for name in _HOLDERS:
        holder = sys.modules.get(name)
        if holder is not None and getattr(holder, "dataset_module_factory", None) is found:
            holder.dataset_module_factory = dataset_module_factory  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find `datasets.load` and wraps the module once it has run."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TARGET or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname) if target is None else _find_again(self, fullname, path, target)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _find_again(
    finder: _Finder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """For a reload, where the module is in sys.modules and `find_spec` would only return its old spec."""
    for other in sys.meta_path:
        if other is not finder and (spec := other.find_spec(fullname, path, target)) is not None:
            return spec
    return None


class _Loader(importlib.abc.Loader):
    """The real loader, then the wrap."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _wrap(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
