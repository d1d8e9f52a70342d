"""What only some versions of an engine load, as far as it is known: seen running, read in source, or announced.

A version below the first good one is an error, an unknown version a warning.

| | SGLang | vLLM |
| --- | --- | --- |
| `norm_before_fc` | 0.5.14 ignores it, 0.5.23 applies it (both run) | before 0.22.0 not from every config (source) |
| `fc_norm`, `norm_output` | 0.5.14 and 0.5.23 apply them (run) | 0.22.0 (announced with EAGLE-3.1) |
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from eagle3_data.train.engines import Engine

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Need:
    """A switch of the draft, and the first version of an engine that is known to apply it."""

    engine: Engine
    switch: str
    since: Version
    why: str

    @property
    def expected(self) -> str:
        return f"{NAMES[self.engine]} {'.'.join(map(str, self.since))} or newer; {self.why}"


NAMES: dict[Engine, str] = {"sglang": "SGLang", "vllm": "vLLM"}
IGNORED = "older ones ignore this norm and draft badly"
NEEDS = (
    Need("sglang", "norm_before_fc", (0, 5, 23), f"{IGNORED}. fc_norm works from 0.5.14 on"),
    Need("sglang", "fc_norm", (0, 5, 14), IGNORED),
    Need("sglang", "norm_output", (0, 5, 14), "older ones feed the un-normed state to the next step"),
    Need("vllm", "norm_before_fc", (0, 22, 0), "older ones do not read it from every form of config"),
    Need("vllm", "fc_norm", (0, 22, 0), IGNORED),
    Need(
        "vllm",
        "norm_output",
        (0, 22, 0),
        "and one that reads it from this form of config (its pull request 46488): others feed the un-normed state",
    ),
)
OLDEST: dict[Engine, Version] = {"sglang": (0, 5, 14), "vllm": (0, 0, 0)}
"""What is assumed of an unknown version: this project runs with SGLang 0.5.14 and newer."""


def parse_version(text: str) -> Version:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def unmet(engine: Engine, switch: str, version: str | None) -> Need | None:
    """The need of `switch` that this version, or an unknown one, may not meet."""
    assumed = OLDEST[engine] if version is None else parse_version(version)
    return next((n for n in NEEDS if (n.engine, n.switch) == (engine, switch) and assumed < n.since), None)
