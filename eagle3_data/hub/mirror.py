"""What a mirror must be able to do, and which kind a name means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from eagle3_data.errors import ConfigError, MirrorError
from eagle3_data.hub.redact import redact
from eagle3_data.manifest import MANIFEST, Manifest
from eagle3_data.patience import Patience

REPOSITORY = re.compile(r"(?:hf://datasets/)?(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    path: str
    nbytes: int
    sha256: str | None
    """None where the mirror does not say."""


@dataclass(frozen=True, slots=True)
class Upload:
    """One sealed shard on its way. `file` must not change any more."""

    path: str
    """In the mirror."""
    file: Path
    nbytes: int
    sha256: str


class Mirror(Protocol):
    """Methods raise MirrorError. `url` names it for people and holds no secret."""

    url: str

    def open(self, *, create: bool) -> None:
        """Connect, and make the mirror when it is not there and `create` says so."""

    def close(self) -> None: ...

    def listing(self) -> dict[str, RemoteFile]:
        """Published shards, by path."""

    def read(self, path: str) -> bytes | None:
        """A small file as published; None when it is not there."""

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Exactly the bytes [start, end)."""

    def send(self, upload: Upload) -> None:
        """Bring the bytes there. What the mirror has already is not sent again. Not visible before `publish`."""

    def publish(self, uploads: Sequence[Upload], small: Mapping[str, bytes], message: str) -> None:
        """Make uploads and small files visible; readers see the old state or the new one."""

    def look(self, paths: Sequence[str]) -> dict[str, RemoteFile]:
        """Size and sha256 of published files, as the mirror has them now."""


def parse_repository(target: str) -> tuple[str, str | None] | None:
    """`org/name`, `hf://datasets/org/name`, each with `@revision`: (name, revision). None for any other URL.

    Raises ConfigError for what is neither.
    """
    if re.match(r"[^:/]+://[^/@]*:[^/@]*@", target):
        raise ConfigError(
            f"{redact(target)} carries credentials", next="leave them out: they belong in the environment of that store"
        )
    match = REPOSITORY.fullmatch(target.rstrip("/"))
    if match:
        return match["name"], match["revision"]
    if "://" in target and not target.startswith("hf://"):
        return None
    raise ConfigError(
        f"{redact(target)!r} names no mirror",
        next="ORG/NAME (a data set on the hub), or a URL such as s3://bucket/name",
    )


def make_mirror(target: str, patience: Patience, *, revision: str | None = None) -> Mirror:
    """`revision`: only to read a repository at another branch, tag or commit than `main`."""
    found = parse_repository(target)
    if found is None:
        from eagle3_data.hub.filesystem import UrlMirror

        if revision is not None:
            raise ConfigError(f"{redact(target)} has no revisions", next="leave out --revision")
        return UrlMirror(target, patience)
    from eagle3_data.hub.repository import HubMirror

    return HubMirror(found[0], patience, revision=revision or found[1] or "main")


def find_manifest(mirror: Mirror) -> Manifest | None:
    """None where there is none. Raises ConfigError when what is there is not one."""
    content = mirror.read(MANIFEST)
    if content is None:
        return None
    return Manifest.parse(content.decode(errors="replace"), f"{mirror.url}/{MANIFEST}")


def manifest_of(mirror: Mirror) -> Manifest:
    """As `find_manifest`; raises MirrorError where there is none."""
    found = find_manifest(mirror)
    if found is None:
        raise MirrorError(f"{mirror.url} holds no {MANIFEST}", next="is it a mirror that eagle3-data pushed?")
    return found
