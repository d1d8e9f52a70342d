"""Import-only stand-in for torchvision, which SGLang and transformers import for image models; text never calls it.

Every name that is asked for is a class, which raises RuntimeError when it is used.
"""

import enum
import importlib.machinery
import sys
import types

__version__ = "0.28.0"


class Unavailable:
    """What every torchvision name stands for here."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("this torchvision is a stand-in without functions; install the real one for image models")


class InterpolationMode(enum.Enum):
    """The one thing that is read at import time."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Module(types.ModuleType):
    """A module that has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> type[Unavailable]:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Unavailable,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


for _name in ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _module = _Module(f"{__name__}.{_name}")
    if _name.startswith("transforms"):
        _module.InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
    sys.modules[_module.__name__] = _module
    _parent, _, _leaf = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _leaf, _module)
