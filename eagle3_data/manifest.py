"""`manifest.json`: what a data set is, and which shards of it are sealed. A shard is data only once its row is here.

The file is replaced whole (atomic, durable) at each seal; at 5,000 shards that is about 1 MB. Readers, resumes, mirrors
and `verify` start from it alone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from eagle3_data import __version__, durable
from eagle3_data.capture import ALIGNMENTS, DEFAULT_ALIGNMENT, Alignment, CaptureSpec
from eagle3_data.errors import ConfigError, Eagle3Error, ManifestMismatch

MANIFEST = "manifest.json"
FAILURES = "failures.jsonl"
"""One row per sample that is not in the shards, with its reason."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class ShardRow(_Model):
    """One sealed shard."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*\.tar$")
    """File name inside `data/`, for example `train-000000.tar`; never a path, since a mirror is not trusted."""
    samples: int
    tokens: int
    nbytes: int
    xxh3: str
    """XXH3-128 of the whole file, hex."""
    sha256: str | None = None
    """Filled in by `push`, which needs it anyway."""


class ServerRow(_Model):
    """One start of a server that filled shards."""

    instance: str
    sglang_version: str
    plugin_version: str
    path: str
    device: str
    tp_size: int
    dp_size: int
    chunk_tokens: int


class PlanRow(_Model):
    """What the build set out to make. planned = samples + skipped."""

    samples: int
    """Samples to extract."""
    tokens: int
    nbytes: int
    """All shards together."""
    shards: int
    shard_bytes: int
    skipped: dict[str, int] = Field(default_factory=dict)
    """Conversations that never became samples, by reason."""

    @property
    def planned(self) -> int:
        return self.samples + sum(self.skipped.values())


class Manifest(_Model):
    format: Literal[1] = 1
    dataset: str
    split: str = Field(default="train", pattern=r"^\w+(\.\w+)*$")
    created_by: str = f"eagle3-data {__version__}"
    run: str
    """Random id of the build; part of every request id."""
    state: Literal["building", "complete"] = "building"
    capture: dict[str, Any]
    samples: dict[str, Any]
    """How ids and masks were made (`SampleSpec`)."""
    fingerprint: dict[str, str]
    """Everything that shapes the data, by name; a resume must have the same."""
    matching: Literal["identity", "token_count", "imported"] = "identity"
    """How states were matched to their samples; 'imported': by the files of another project."""
    plan: PlanRow
    servers: tuple[ServerRow, ...] = ()
    shards: tuple[ShardRow, ...] = ()
    failed: dict[str, int] = Field(default_factory=dict)
    """Samples not saved, by reason; each has a row in `failures.jsonl`."""

    @field_validator("capture")
    @classmethod
    def _capture_is_whole(cls, value: dict[str, Any]) -> dict[str, Any]:
        CaptureSpec.from_dict(value)
        return value

    @property
    def spec(self) -> CaptureSpec:
        return CaptureSpec.from_dict(self.capture)

    @property
    def alignment(self) -> Alignment:
        """Rows that the makers of the data meant to be trained. Raises ConfigError for one that is unknown."""
        found = self.samples.get("alignment", DEFAULT_ALIGNMENT)
        for known in ALIGNMENTS:
            if found == known:
                return known
        raise ConfigError(f"manifest: samples.alignment {found!r} is not one of {', '.join(ALIGNMENTS)}")

    @property
    def saved(self) -> int:
        return sum(row.samples for row in self.shards)

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.shards)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.shards)

    @property
    def content_id(self) -> str:
        """Changes with every sealed shard: names this content in caches, cards and checkpoints."""
        text = json.dumps([self.fingerprint, [row.xxh3 for row in self.shards]], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def check_same(self, fingerprint: dict[str, str]) -> None:
        """Raises ManifestMismatch naming the first field that a resume would change."""
        for name in sorted({*self.fingerprint, *fingerprint}):
            old, new = self.fingerprint.get(name), fingerprint.get(name)
            if old != new:
                raise ManifestMismatch(
                    f"this build was started with {name} = {old}, now it is {new}",
                    next="pass the same settings to go on, or another output folder to start anew",
                )

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Raises ConfigError when `folder` is no build, or one of another format."""
        try:
            text = (folder / MANIFEST).read_text()
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(
                f"{folder} holds no {MANIFEST}, so it is not a build", next="eagle3-data build --help"
            ) from None
        return cls.parse(text, f"{folder / MANIFEST}")

    @classmethod
    def parse(cls, text: str, where: str) -> Manifest:
        try:
            return cls.model_validate_json(text)
        except (ValidationError, Eagle3Error) as error:
            raise ConfigError(f"{where} is not a manifest this version reads: {error}") from error

    def save(self, folder: Path) -> None:
        durable.write_text(folder / MANIFEST, self.model_dump_json(indent=1) + "\n")
