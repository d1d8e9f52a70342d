"""Where a published build is read from: an HTTP(S) folder, a hub repository, or any fsspec URL."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from eagle3_data.errors import ConfigError, DatasetUnavailable, ShardCorrupt
from eagle3_data.shards.http import HttpBody, HttpReader, TransientError

HUB_URL = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<folder>.+))?", re.ASCII)


class Body(Protocol):
    """The bytes of one answer; `length`: how many there will be, where it is known."""

    @property
    def length(self) -> int | None: ...

    def receive(self, view: memoryview) -> int: ...
    def close(self) -> None: ...


class Source(Protocol):
    """A folder of files. `url` names it for good: a hub branch becomes the commit that it was when it was opened."""

    url: str

    def open(self, path: str, start: int = 0, end: int | None = None) -> Body: ...


@dataclass(frozen=True, slots=True)
class Access:
    """How to get in. Never shown: `repr` hides both."""

    token: str | bool | None = None
    """For the hub; None: the one that is logged in."""
    options: str = "{}"
    """For fsspec: `storage_options`, as JSON."""

    @classmethod
    def of(cls, token: str | bool | None, options: Mapping[str, Any] | None) -> Access:
        """Raises ConfigError for options that are not plain values. `hf` is what `datasets` itself puts there."""
        plain = {name: value for name, value in (options or {}).items() if name != "hf"}
        try:
            return cls(token, json.dumps(plain, sort_keys=True))
        except (TypeError, ValueError) as error:
            raise ConfigError("storage_options of a mirror must be plain values", next="strings and numbers") from error

    def __repr__(self) -> str:
        return "Access(...)"


def mirror_url(mirror: str, revision: str | None = None) -> str:
    """A URL stays as it is; `org/name` means that data set repository on the hub."""
    if "://" in mirror:
        url = mirror.rstrip("/")
        match = HUB_URL.fullmatch(url)
        if revision is None or (match and match["revision"]):
            return url
        if match is None:
            raise ConfigError(f"{mirror} has no revisions", next="leave out revision=")
        folder = f"/{match['folder']}" if match["folder"] else ""
        return f"hf://datasets/{match['repo']}@{urllib.parse.quote(revision, safe='')}{folder}"
    return f"hf://datasets/{mirror}{'@' + urllib.parse.quote(revision, safe='') if revision else ''}"


def open_source(url: str, access: Access) -> Source:
    """`url` as `mirror_url` gives it."""
    if url.startswith(("http://", "https://")):
        return HttpSource(url)
    if url.startswith("hf://"):
        return HubSource(url, access)
    return FsspecSource(url, access)


class HttpSource:
    """A folder behind any web server that answers range requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._base, self._reader = url, HttpReader(url)

    def open(self, path: str, start: int = 0, end: int | None = None) -> HttpBody:
        return self._reader.open(f"{self._base}/{urllib.parse.quote(path)}", start, end)


class HubSource:
    """A data set repository, through its resolve links, at one commit."""

    def __init__(self, url: str, access: Access) -> None:
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined, unused-ignore]

        match = HUB_URL.fullmatch(url)
        if match is None:
            raise ConfigError(f"{url} is not a data set on the hub", next="hf://datasets/ORG/NAME[@REVISION][/FOLDER]")
        self.url = url
        self._match, self._commit = match, match["revision"] or "main"
        self._endpoint = constants.ENDPOINT.rstrip("/")
        self._reader = HttpReader(self._endpoint, build_hf_headers(token=access.token))

    def open(self, path: str, start: int = 0, end: int | None = None) -> HttpBody:
        folder = f"{self._match['folder']}/" if self._match["folder"] else ""
        where = f"{self._endpoint}/datasets/{self._match['repo']}/resolve/{self._commit}"
        body = self._reader.open(f"{where}/{urllib.parse.quote(folder + path)}", start, end)
        commit = body.headers.get("X-Repo-Commit")
        if commit and commit != self._commit and re.fullmatch(r"[0-9a-f]{40}", commit):
            self._commit = commit  # from here on the branch may move
            folder = f"/{self._match['folder']}" if self._match["folder"] else ""
            self.url = f"hf://datasets/{self._match['repo']}@{commit}{folder}"
        return body


class FsspecSource:
    """Any other filesystem (s3://, gs://, file://, memory://), range by range."""

    def __init__(self, url: str, access: Access) -> None:
        import fsspec

        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, **json.loads(access.options))
        except (ImportError, ValueError) as error:
            raise DatasetUnavailable(f"{url}: {error}", next="check the URL, or install its filesystem") from error

    def open(self, path: str, start: int = 0, end: int | None = None) -> _Bytes:
        where = f"{self._root}/{path}"
        try:
            data = self._fs.cat_file(where, start=start or None, end=end)
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise DatasetUnavailable(
                f"{self.url}/{path}: {type(error).__name__}", next="check the name and your credentials"
            ) from error
        except Exception as error:  # each filesystem has errors of its own
            raise TransientError(f"{type(error).__name__}: {error}") from error
        if end is not None and len(data) != end - start:
            raise ShardCorrupt(f"{self.url}/{path} has {len(data)} bytes at {start}, expected {end - start}")
        return _Bytes(data)


class _Bytes:
    """Bytes that are here already, as a body."""

    def __init__(self, data: bytes) -> None:
        self._rest, self.length = memoryview(data), len(data)

    def receive(self, view: memoryview) -> int:
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        self._rest.release()
