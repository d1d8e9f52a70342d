"""Methods of `datasets` that are given another body, once, however often this package is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MARK = "_eagle3_data"


def wrap_once(owner: Any, method: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `make(original)` in the place of `owner.method`, under its name and signature."""
    original = getattr(owner, method)
    if not getattr(original, MARK, False):
        wrapped = functools.wraps(original)(make(original))
        setattr(wrapped, MARK, True)
        setattr(owner, method, wrapped)
