"""What a build is told, and what it says at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from eagle3_data.builders.matching import STRENGTHS, Strength
from eagle3_data.builders.pool import FlowConfig
from eagle3_data.builders.samples.spec import SampleSpec
from eagle3_data.capture import ENCODINGS, Encoding, parse_last
from eagle3_data.errors import ConfigError

Engine = Literal["local", "ray"]
ENGINES: tuple[Engine, ...] = ("local", "ray")


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildConfig:
    """One build. The folder `out` remembers it: a resume with other data-shaping settings is refused."""

    out: Path
    inputs: tuple[str, ...]
    """Conversation files (see docs/samples.md)."""
    model: str
    """Tokenizer and target: a folder or hub id, as the server names it."""
    servers: tuple[str, ...]
    dataset: str = "custom"
    split: str = "train"
    samples: SampleSpec = field(default_factory=SampleSpec)
    layers: tuple[int, ...] | None = None
    """Expected aux layers (outputs); None: whatever the servers capture."""
    last: str = "hidden"
    """'hidden', 'topk:K' or 'none'."""
    encoding: Encoding = "bf16"
    """Of all stored states."""
    last_encoding: Encoding | None = None
    """Of the last state; None: as `encoding`."""
    head: str | None = None
    """Checkpoint whose head gives the top-k; None: `model`."""
    head_device: str = "cpu"
    shard_bytes: int = 1 << 30
    flow: FlowConfig = field(default_factory=FlowConfig)
    max_failure_share: float = 0.01
    """The run stops once more samples than this share of all were given up (one is always allowed)."""
    matching: Strength = "identity"
    spool: Path | None = None
    """Only for matching by token count: where the older patch writes."""
    api_key: str | None = None
    trust_remote_code: bool = False
    retry_failed: bool = False
    """Try the given-up samples of earlier runs again, in shards of their own."""
    interval_s: float = 5.0
    mirror: str | None = None
    """Push while building: ORG/NAME on the hub, or any fsspec URL."""
    delete_local: bool = False
    """Remove a sealed shard here once the mirror confirmed its size and sha256."""
    scratch_bytes: int | None = None
    """With `delete_local`: shard bytes that may lie here at once; None: four fifths of what is free."""
    part: tuple[int, int] | None = None
    """(i, n): only every n-th shard of the plan, from the i-th on (0 <= i < n); `merge` joins the n folders."""
    engine: Engine = "local"
    """'ray': the build is dealt in parts to the workers of a Ray cluster, and merged."""
    workers: int | None = None
    """With the engine 'ray': parts. None: as many as servers, or as the folder remembers."""

    def __post_init__(self) -> None:
        if self.part is not None and not 0 <= self.part[0] < self.part[1]:
            raise ConfigError(f"--shards {self.part[0]}/{self.part[1]}: i must be from 0 to n - 1")
        if not 0 <= self.max_failure_share <= 1:
            raise ConfigError(f"--max-failure-share must be between 0 and 1, got {self.max_failure_share}")
        for name, value, known in (
            ("--encoding", self.encoding, ENCODINGS),
            ("--matching", self.matching, STRENGTHS),
            ("--engine", self.engine, ENGINES),
        ):
            if value not in known:
                raise ConfigError(f"{name} {value!r} is not one of {', '.join(known)}")
        parse_last(self.last)
        if self.mirror is None and (self.delete_local or self.scratch_bytes is not None):
            raise ConfigError("--delete-local and --scratch need --mirror")
        if self.scratch_bytes is not None and not self.delete_local:
            raise ConfigError("--scratch needs --delete-local", next="without it every shard stays here")
        if self.matching == "token_count" and self.spool is None:
            raise ConfigError(
                "matching by token count needs --spool", next="or use a server with the eagle3-data plugin"
            )
        self._check_engine()

    def _check_engine(self) -> None:
        if self.engine == "local":
            if self.workers is not None:
                raise ConfigError("--workers needs --engine ray", next="one machine takes several --server as it is")
            return
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers must be > 0, got {self.workers}")
        if self.part is not None:
            raise ConfigError("--engine ray deals the parts itself", next="leave out --shards")
        if self.mirror is not None:
            raise ConfigError(
                "--engine ray has no --mirror: parts would write the same names",
                next="eagle3-data push OUT MIRROR, once the build is merged",
            )
        if self.matching != "identity":
            raise ConfigError("--engine ray needs servers with the eagle3-data plugin (--matching identity)")


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildReport:
    """How a run ended. saved + failed + skipped == planned when `complete`."""

    out: Path
    complete: bool
    planned: int
    saved: int
    failed: dict[str, int]
    skipped: dict[str, int]
    retried: dict[str, int]
    sent: int
    """Requests sent by this run."""
    resumed: int
    """Samples that were there when this run began."""
    adopted: int
    """Dumps of an earlier process that were used."""
    swept: int
    """Dumps nobody waited for any more, thrown away."""
    tokens: int
    nbytes: int
    tokens_per_s: float
    """Of the whole build, all runs together."""
