"""Make, keep and use EAGLE-3 training data.

Importing this package teaches `datasets.load_dataset` our names (see `eagle3_data.registration`) and loads neither
torch nor datasets: it also runs inside the SGLang process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

from eagle3_data.registration import register as _register

if TYPE_CHECKING:
    from eagle3_data.loading import load_dataset

__all__ = ["__version__", "load_dataset"]

_register()


def __getattr__(name: str) -> Any:
    if name != "load_dataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eagle3_data.loading import load_dataset

    return load_dataset
