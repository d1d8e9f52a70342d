"""Sizes that people write: '100GB', '1GiB', '4096'."""

from __future__ import annotations

import re

from eagle3_data.errors import ConfigError

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?", re.IGNORECASE)
UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_size(text: str) -> int:
    """'1GiB', '500 MB', '4096' -> bytes. Raises ConfigError."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size", next="for example 1GiB, 500MB or 1073741824")
    return int(float(match[1]) * UNITS[(match[2] or "B").lower()])
