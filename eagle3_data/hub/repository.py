"""A data set repository on a hub (huggingface.co, or whatever HF_ENDPOINT names), through `huggingface_hub`."""

from __future__ import annotations

import importlib.util
import urllib.parse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session

from eagle3_data.errors import MirrorError
from eagle3_data.hub.mirror import RemoteFile, Upload
from eagle3_data.manifest import MANIFEST
from eagle3_data.patience import Patience

KIND = "dataset"
LOST_RACE = (409, 412)
"""What the hub answers when another commit came first."""
LOOK_AT_ONCE = 100


class HubMirror:
    """Not thread-safe, but `send` and `read_range`. Bytes go by xet where the endpoint has it, else by LFS."""

    def __init__(self, name: str, patience: Patience, *, revision: str = "main") -> None:
        self.url, self.name, self.patience = f"hf://datasets/{name}", name, patience
        self.api = HfApi()
        self.revision = revision
        self.head = ""
        """The commit that is read, and the parent of the next one."""
        self.uses_xet = False
        self._operations: dict[str, CommitOperationAdd] = {}
        self._xet_was_off: bool = huggingface_hub.constants.HF_HUB_DISABLE_XET

    def open(self, *, create: bool) -> None:
        if create:
            self.patience.call(
                f"create {self.name}", lambda: self.api.create_repo(self.name, repo_type=KIND, exist_ok=True)
            )
        self.head = self._fetch_head()
        if create:
            self._choose_transport()

    def close(self) -> None:
        huggingface_hub.constants.HF_HUB_DISABLE_XET = self._xet_was_off

    def listing(self) -> dict[str, RemoteFile]:
        def work() -> dict[str, RemoteFile]:
            try:
                found = self.api.list_repo_tree(self.name, "data", recursive=True, revision=self.head, repo_type=KIND)
                return {file.path: file for file in map(_remote_file, found) if file}
            except EntryNotFoundError:
                return {}

        return self.patience.call(f"list {self.name}", work)

    def read(self, path: str) -> bytes | None:
        return self.patience.call(f"read {path} of {self.name}", lambda: self._get(path, {}))

    def read_range(self, path: str, start: int, end: int) -> bytes:
        def work() -> bytes:
            data = self._get(path, {"Range": f"bytes={start}-{end - 1}"})
            if data is None:
                raise MirrorError(f"{self.url} has no {path} any more")
            if len(data) != end - start:
                raise ConnectionError(f"{len(data)} of {end - start} bytes came")
            return data

        return self.patience.call(f"read {path} of {self.name}", work)

    def send(self, upload: Upload) -> None:
        def work() -> None:
            operation = CommitOperationAdd(upload.path, str(upload.file))
            operation.upload_info.sha256 = bytes.fromhex(upload.sha256)  # computed already: not a second time
            # asks what the hub has, so an object that a killed push sent and never committed is not sent again
            self.api.preupload_lfs_files(self.name, [operation], repo_type=KIND, revision=self.revision)
            self._operations[upload.path] = operation

        self.patience.call(f"send {upload.path} to {self.name}", work)

    def publish(self, uploads: Sequence[Upload], small: Mapping[str, bytes], message: str) -> None:
        known = self.read(MANIFEST)
        tried = False

        def work() -> str:
            nonlocal tried
            if tried:
                self.head = self._fetch_head()
                now = self.read(MANIFEST)
                if now == small[MANIFEST]:
                    return self.head  # the commit was made and its answer was lost
                if now != known:
                    raise MirrorError(
                        f"another push writes to {self.url}: its manifest changed meanwhile",
                        next="let one machine push this build, then repeat the command",
                    )
            tried = True
            operations = [self._operations[upload.path] for upload in uploads]
            operations += [CommitOperationAdd(path, content) for path, content in small.items()]
            made = self.api.create_commit(
                self.name,
                operations,
                commit_message=message,
                repo_type=KIND,
                revision=self.revision,
                parent_commit=self.head,
            )
            return str(made.oid)

        self.head = self.patience.call(f"commit to {self.name}", work, also=LOST_RACE)
        for upload in uploads:
            self._operations.pop(upload.path, None)

    def look(self, paths: Sequence[str]) -> dict[str, RemoteFile]:
        found: dict[str, RemoteFile] = {}
        for at in range(0, len(paths), LOOK_AT_ONCE):
            some = list(paths[at : at + LOOK_AT_ONCE])
            infos = self.patience.call(f"ask {self.name}", partial(self._paths_info, some))
            found.update({file.path: file for file in map(_remote_file, infos) if file})
        return found

    def _paths_info(self, paths: list[str]) -> list[Any]:
        return list(self.api.get_paths_info(self.name, paths, revision=self.head, repo_type=KIND))

    def _fetch_head(self) -> str:
        info = self.patience.call(
            f"open {self.name}", lambda: self.api.repo_info(self.name, repo_type=KIND, revision=self.revision)
        )
        return str(info.sha)

    def _get(self, path: str, headers: dict[str, str]) -> bytes | None:
        """Content at `head`; None for 404. The session takes the token along on no redirect to another host."""
        url = f"{self.api.endpoint}/datasets/{self.name}/resolve/{self.head}/{urllib.parse.quote(path)}"
        response = get_session().get(url, headers={**self._headers(), **headers})
        if response.status_code == 404:
            return None
        response.raise_for_status()
        content: bytes = response.content
        return content

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = build_hf_headers(token=self.api.token)
        return headers

    def _choose_transport(self) -> None:
        """`huggingface_hub` always takes xet when hf_xet is installed, and has no way back on a hub without it."""
        if self._xet_was_off:
            return
        self.uses_xet = importlib.util.find_spec("hf_xet") is not None and self._has_xet()
        huggingface_hub.constants.HF_HUB_DISABLE_XET = not self.uses_xet

    def _has_xet(self) -> bool:
        url = f"{self.api.endpoint}/api/datasets/{self.name}/xet-write-token/{self.revision}"

        def work() -> bool:
            response = get_session().get(url, headers=self._headers())
            if response.status_code in (429, 500, 502, 503, 504):
                response.raise_for_status()
            return response.status_code == 200

        return self.patience.call(f"ask {self.name} for xet", work)


def _remote_file(entry: Any) -> RemoteFile | None:
    """None for folders. A large file's sha256 comes with it; a small one is a git blob, whose id is no sha256."""
    size = getattr(entry, "size", None)
    if size is None:
        return None
    large = getattr(entry, "lfs", None)
    return RemoteFile(entry.path, int(size), str(large.sha256) if large else None)
