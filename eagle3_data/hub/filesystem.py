"""Any fsspec URL as a mirror: s3://, gs://, file://, memory:// ... Credentials come from its own settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import fsspec
from fsspec.implementations.local import LocalFileSystem

from eagle3_data.errors import ConfigError
from eagle3_data.hub.digest import remote_digest
from eagle3_data.hub.mirror import RemoteFile, Upload
from eagle3_data.hub.redact import redact
from eagle3_data.manifest import MANIFEST
from eagle3_data.patience import Patience


class UrlMirror:
    """A shard is published once the manifest lists it; the manifest is written last. `send`, `read_range`: any thread.

    These stores do not tell a sha256, so `look` gives sizes alone.
    """

    def __init__(self, url: str, patience: Patience) -> None:
        self.url, self.patience = redact(url.rstrip("/")), patience
        try:
            self.fs, self.root = fsspec.core.url_to_fs(url.rstrip("/"))
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{self.url}: {redact(str(error))}", next="check the URL, or install its filesystem"
            ) from None

    def open(self, *, create: bool) -> None:
        if create:
            self.patience.call(f"open {self.url}", lambda: self.fs.makedirs(self.root, exist_ok=True))

    def close(self) -> None:
        pass

    def listing(self) -> dict[str, RemoteFile]:
        def work() -> dict[str, RemoteFile]:
            self.fs.invalidate_cache()
            found = self.fs.find(self._place("data"), detail=True)
            files = (self._remote_file(name, int(info["size"])) for name, info in found.items())
            return {file.path: file for file in files if not file.path.rpartition("/")[2].startswith(".")}

        return self.patience.call(f"list {self.url}", work)

    def read(self, path: str) -> bytes | None:
        def work() -> bytes | None:
            try:
                content: bytes = self.fs.cat_file(self._place(path))
                return content
            except FileNotFoundError:
                return None

        return self.patience.call(f"read {path} of {self.url}", work)

    def read_range(self, path: str, start: int, end: int) -> bytes:
        def work() -> bytes:
            data: bytes = self.fs.cat_file(self._place(path), start=start, end=end)
            if len(data) != end - start:
                raise ConnectionError(f"{len(data)} of {end - start} bytes came")
            return data

        return self.patience.call(f"read {path} of {self.url}", work)

    def send(self, upload: Upload) -> None:
        def work() -> None:
            if not self._has(upload):
                self._put(upload)

        self.patience.call(f"send {upload.path} to {self.url}", work)

    def publish(self, uploads: Sequence[Upload], small: Mapping[str, bytes], message: str) -> None:
        for path in sorted(small, key=lambda path: path == MANIFEST):
            self.patience.call(f"write {path} to {self.url}", partial(self._write, path, small[path]))

    def look(self, paths: Sequence[str]) -> dict[str, RemoteFile]:
        listed = self.listing()
        return {path: listed[path] for path in paths if path in listed}

    def _put(self, upload: Upload) -> None:
        place = self._place(upload.path)
        if not isinstance(self.fs, LocalFileSystem):
            self.fs.makedirs(place.rpartition("/")[0], exist_ok=True)
            self.fs.put_file(str(upload.file), place)  # object stores show an object whole or not at all
            return
        folder, _, name = place.rpartition("/")
        self.fs.makedirs(folder, exist_ok=True)
        self.fs.put_file(str(upload.file), f"{folder}/.{name}.tmp")
        self.fs.mv(f"{folder}/.{name}.tmp", place)

    def _write(self, path: str, content: bytes) -> None:
        folder, _, name = self._place(path).rpartition("/")
        self.fs.makedirs(folder, exist_ok=True)
        if not isinstance(self.fs, LocalFileSystem):
            self.fs.pipe_file(f"{folder}/{name}", content)
            return
        self.fs.pipe_file(f"{folder}/.{name}.tmp", content)
        self.fs.mv(f"{folder}/.{name}.tmp", f"{folder}/{name}")

    def _has(self, upload: Upload) -> bool:
        """Whether an earlier push sent it and did not live to publish it."""
        self.fs.invalidate_cache()
        place = self._place(upload.path)
        if not self.fs.exists(place) or self.fs.info(place)["size"] != upload.nbytes:
            return False
        return remote_digest(self, upload.path, upload.nbytes).sha256 == upload.sha256

    def _place(self, path: str) -> str:
        return f"{self.root}/{path}"

    def _remote_file(self, name: str, nbytes: int) -> RemoteFile:
        return RemoteFile(name[len(self.root) :].lstrip("/"), nbytes, None)
