"""A hub for tests: what `huggingface_hub` and `datasets` ask of the real one, on loopback, with faults on request.

Endpoints: whoami, create, repository info, preupload, LFS batch (basic and multipart) with PUT and verify, commit,
tree, paths-info, refs, resolve (HEAD, GET, Range), xet tokens (`xet_store`: hf_xet's own local:// store).
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.store import LARGE, Commit, Conflict, Entry, Incomplete, Repository, Store

PIECE = 64 << 10
DATE = "2026-01-01T00:00:00.000Z"


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next `times` requests that match. After `skip` matching ones."""

    method: str
    path: str
    """Regular expression, searched in the path."""
    status: int = 503
    """0: the connection is closed without an answer."""
    times: int = 1
    skip: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    after: bool = False
    """The request is carried out, and its answer is lost."""
    cut: int | None = None
    """Only for file contents: the connection ends after so many bytes."""
    message: str = "injected"


@dataclass(frozen=True, slots=True)
class Seen:
    """One request, as it came. `t`: monotonic seconds at its arrival."""

    t: float
    method: str
    path: str
    range: str
    authorization: str


class HubStub:
    """`with HubStub(folder) as hub:` serves at `hub.url`. `token`: when set, every API request must carry it."""

    def __init__(
        self, folder: Path, *, part_size: int | None = None, xet_store: Path | None = None, token: str | None = None
    ) -> None:
        self.store = Store(folder)
        self.part_size, self.xet_store, self.token = part_size, xet_store, token
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.pace: Callable[[str, str], None] = lambda method, path: None
        """Called before each request and each piece of an upload; a test may wait in it."""
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubStub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fault(self, method: str, path: str) -> Fault | None:
        with self.store.lock:
            for fault in self.faults:
                if fault.times and fault.method in (method, "*") and re.search(fault.path, path):
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def requests(self, method: str, path: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.method == method and re.search(path, seen.path)]

    def repository(self, name: str) -> Repository:
        return self.store.repositories[name]

    def files(self, name: str) -> dict[str, Entry]:
        return self.repository(name).head.tree

    def content(self, name: str, path: str) -> bytes:
        entry = self.files(name)[path]
        return self.store.read(entry, 0, entry.size)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _Gone(Exception):
    """Close the connection without an answer."""


NAME = r"(?P<name>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES: list[tuple[str, re.Pattern[str], str]] = [
    (method, re.compile(pattern), function)
    for method, pattern, function in [
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", rf"/datasets/{NAME}\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs_put"),
        ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})/part/(?P<number>\d+)", "lfs_part"),
        ("POST", r"/lfs/(?P<oid>[0-9a-f]{64})/complete", "lfs_complete"),
        ("POST", r"/lfs/verify", "lfs_verify"),
        ("GET", rf"/api/datasets/{NAME}/xet-(?:read|write)-token/{REVISION}", "xet_token"),
        ("POST", rf"/api/datasets/{NAME}/preupload/{REVISION}", "preupload"),
        ("POST", rf"/api/datasets/{NAME}/commit/{REVISION}", "commit"),
        ("GET", rf"/api/datasets/{NAME}/refs", "refs"),
        ("GET", rf"/api/datasets/{NAME}/tree/{REVISION}(?:/(?P<path>.*))?", "tree"),
        ("POST", rf"/api/datasets/{NAME}/paths-info/{REVISION}", "paths_info"),
        ("GET", rf"/api/datasets/{NAME}(?:/revision/{REVISION})?", "info"),
        ("GET", rf"/datasets/{NAME}/resolve/{REVISION}/(?P<path>.+)", "resolve"),
        ("HEAD", rf"/datasets/{NAME}/resolve/{REVISION}/(?P<path>.+)", "resolve"),
    ]
]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubStub

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    # -- requests in, answers out

    def serve(self) -> None:
        parts = urlsplit(self.path)
        path, self.query = parts.path, parse_qs(parts.query)
        authorization = self.headers.get("Authorization", "")
        self.hub.seen.append(
            Seen(time.monotonic(), self.command, self.path, self.headers.get("Range", ""), authorization)
        )
        self.fault = self.hub.fault(self.command, self.path)
        self._answered = self._consumed = False
        try:
            self.hub.pace(self.command, path)
            if self.fault and not self.fault.after and self.fault.cut is None:
                self._fail(self.fault)
            elif self.hub.token and "/lfs/" not in path and authorization != f"Bearer {self.hub.token}":
                self.error(401, "Unauthorized", "Invalid credentials in Authorization header")
            else:
                self._dispatch(path)
        except (BrokenPipeError, ConnectionResetError, _Gone):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = serve

    def _dispatch(self, path: str) -> None:
        for method, pattern, function in ROUTES:
            if method == self.command and (match := pattern.fullmatch(path)):
                arguments = {name: unquote(value) for name, value in match.groupdict().items() if value is not None}
                getattr(self, f"on_{function}")(**arguments)
                return
        self.error(404, "NotFound", f"the stub has no {self.command} {path}")

    def _fail(self, fault: Fault) -> None:
        if not fault.status:
            raise _Gone
        self.close_connection = True
        # an error that echoes what it was sent, as some proxies do: nothing of it may reach a log of ours
        echo = f"{fault.message} {self.headers.get('Authorization', '')}"
        self.send(fault.status, json.dumps({"error": echo}).encode(), {"X-Error-Message": echo, **fault.headers})

    def send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        if not self._consumed:
            self.body()
        if self.fault and self.fault.after and status < 400:
            fault, self.fault = self.fault, None
            self._fail(fault)
            return
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer(self, value: Any, headers: dict[str, str] | None = None) -> None:
        self.send(200, json.dumps(value).encode(), headers)

    def error(self, status: int, code: str, message: str) -> None:
        self.send(status, json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def pieces(self) -> Iterator[bytes]:
        """The request's body as it arrives, sized or chunked. Raises _Gone when it ends early."""
        self._consumed = True
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            piece = self.rfile.read(min(left, PIECE))
            if not piece:
                raise _Gone
            left -= len(piece)
            self.hub.pace("BODY", self.path)
            yield piece

    def body(self) -> bytes:
        return b"".join(self.pieces())

    def found(self, name: str, revision: str = "main") -> Commit | None:
        """The commit; None after an error was answered."""
        repository = self.hub.store.repositories.get(name)
        if repository is None:
            self.error(404, "RepoNotFound", "Repository not found")
            return None
        commit = repository.at(revision)
        if commit is None:
            self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    # -- accounts and repositories

    def on_whoami(self) -> None:
        self.answer({"type": "user", "name": "tester", "auth": {"accessToken": {"role": "write"}}})

    def on_validate_yaml(self) -> None:
        self.answer({"errors": [], "warnings": []})

    def on_create(self) -> None:
        wanted = json.loads(self.body())
        name = f"{wanted.get('organization') or 'tester'}/{wanted['name']}"
        created = self.hub.store.create(name)
        value = {"url": f"{self.hub.url}/datasets/{name}", "id": name, "name": name, "private": False}
        if created:
            self.answer(value)
        else:
            self.send(409, json.dumps({"error": "You already created this dataset repo", **value}).encode())

    def on_info(self, name: str, revision: str = "main") -> None:
        if commit := self.found(name, revision):
            self.answer(
                {
                    "_id": commit.oid[:24],
                    "id": name,
                    "author": name.split("/")[0],
                    "sha": commit.oid,
                    "lastModified": DATE,
                    "createdAt": DATE,
                    "private": False,
                    "gated": False,
                    "disabled": False,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                    "siblings": [{"rfilename": path} for path in sorted(commit.tree)],
                }
            )

    def on_refs(self, name: str) -> None:
        if commit := self.found(name):
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": commit.oid}
            self.answer({"branches": [main], "tags": [], "converts": []})

    # -- uploads

    def on_xet_token(self, name: str, revision: str) -> None:
        if self.hub.xet_store is None:
            self.error(404, "NotFound", "no xet here")
            return
        url, expires = f"local://{self.hub.xet_store.resolve()}", int(time.time()) + 3600
        headers = {
            "X-Xet-Cas-Url": url,
            "X-Xet-Access-Token": "xet",
            "X-Xet-Token-Expiration": str(expires),
        }
        self.answer({"casUrl": url, "exp": expires, "accessToken": "xet"}, headers)

    def on_preupload(self, name: str, revision: str) -> None:
        wanted = json.loads(self.body())["files"]
        if commit := self.found(name, revision):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) or file["size"] > 10 << 20 else "regular",
                    "shouldIgnore": False,
                    "oid": commit.tree[file["path"]].oid if file["path"] in commit.tree else None,
                }
                for file in wanted
            ]
            self.answer({"files": files})

    def on_lfs_batch(self, name: str) -> None:
        wanted, objects = json.loads(self.body()), []
        for item in wanted["objects"]:
            oid, size = item["oid"], item["size"]
            self.hub.store.sizes[oid] = size
            answer: dict[str, Any] = {"oid": oid, "size": size}
            if not self.hub.store.blob(oid).exists():
                answer["actions"] = {
                    "upload": self._upload_action(oid, size, wanted["transfers"]),
                    "verify": {"href": f"{self.hub.url}/lfs/verify"},
                }
            objects.append(answer)
        self.answer({"transfer": "basic", "objects": objects})

    def _upload_action(self, oid: str, size: int, transfers: list[str]) -> dict[str, Any]:
        base, part = f"{self.hub.url}/lfs/{oid}", self.hub.part_size
        if part is None or size <= part or "multipart" not in transfers:
            return {"href": base}
        parts = {f"{i:05d}": f"{base}/part/{i}" for i in range(1, -(-size // part) + 1)}
        return {"href": f"{base}/complete", "header": {"chunk_size": str(part), **parts}}

    def on_lfs_put(self, oid: str) -> None:
        store = self.hub.store
        held = store.folder / "parts" / oid
        if store.take(oid, self.pieces(), held) != oid:
            self.error(400, "BadDigest", "the bytes do not give the sha256 in the address")
            return
        held.replace(store.blob(oid))
        self.send(200, headers={"ETag": f'"{oid}"'})

    def on_lfs_part(self, oid: str, number: str) -> None:
        digest = self.hub.store.take(oid, self.pieces(), self.hub.store.part(oid, int(number)))
        self.send(200, headers={"ETag": f'"{digest}"'})

    def on_lfs_complete(self, oid: str) -> None:
        numbers = sorted(part["partNumber"] for part in json.loads(self.body())["parts"])
        if self.hub.store.join(oid, numbers):
            self.answer({"success": True})
        else:
            self.error(400, "BadDigest", "the parts do not give the sha256")

    def on_lfs_verify(self) -> None:
        item = json.loads(self.body())
        blob = self.hub.store.blob(item["oid"])
        if blob.exists() and blob.stat().st_size == item["size"]:
            self.answer({})
        else:
            self.error(404, "NotFound", "no such object of that size")

    def on_commit(self, name: str, revision: str) -> None:
        lines = [json.loads(line) for line in self.body().splitlines() if line.strip()]
        if self.found(name) is None:
            return
        header, changes = lines[0]["value"], []
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                changes.append({"kind": "large", "path": value["path"], "oid": value["oid"], "size": value["size"]})
            elif line["key"] == "file":
                content = base64.b64decode(value["content"])
                changes.append({"kind": "small", "path": value["path"], "content": content})
            else:
                changes.append({"kind": "delete", "path": value["path"]})
        try:
            anything = self.hub.xet_store is not None
            commit = self.hub.store.commit(name, header.get("parentCommit"), header["summary"], changes, anything)
        except Conflict as error:
            self.error(412, "PreconditionFailed", f"A commit has happened since. {error}")
            return
        except Incomplete as error:
            self.error(400, "LfsMissing", f"LFS pointer points to a file that does not exist: {error}")
            return
        url = f"{self.hub.url}/datasets/{name}/commit/{commit.oid}"
        self.answer({"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""})

    # -- reading

    def on_tree(self, name: str, revision: str, path: str = "") -> None:
        commit = self.found(name, revision)
        if commit is None:
            return
        prefix = f"{path.strip('/')}/" if path.strip("/") else ""
        below = {file: entry for file, entry in commit.tree.items() if file.startswith(prefix)}
        if prefix and not below:
            self.error(404, "EntryNotFound", f"{path} does not exist on {revision}")
            return
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("1", "true")
        shown = [file for file in sorted(below) if recursive or "/" not in file[len(prefix) :]]
        folders = sorted({prefix + file[len(prefix) :].split("/")[0] for file in below if "/" in file[len(prefix) :]})
        self.answer([_folder(one) for one in folders] + [_file(file, below[file]) for file in shown])

    def on_paths_info(self, name: str, revision: str) -> None:
        body = self.body()
        commit = self.found(name, revision)
        if commit is None:
            return
        asked = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
        paths = [path.strip("/") for path in ([asked] if isinstance(asked, str) else asked)]
        folders = [path for path in paths if any(file.startswith(f"{path}/") for file in commit.tree)]
        files = [_file(path, commit.tree[path]) for path in paths if path in commit.tree]
        self.answer(files + [_folder(path) for path in folders])

    def on_resolve(self, name: str, revision: str, path: str) -> None:
        commit = self.found(name, revision)
        if commit is None:
            return
        entry = commit.tree.get(path)
        headers = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        if entry is None:
            self.send(404, b"", {**headers, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        start, end, status = 0, entry.size, 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end = int(match[1]), min(int(match[2]) + 1 if match[2] else entry.size, entry.size)
            if start >= entry.size:
                self.send(416, b"", {"Content-Range": f"bytes */{entry.size}"})
                return
            status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{entry.size}"
        self._stream(entry, start, end, status, {**headers, "ETag": f'"{entry.oid}"'})

    def _stream(self, entry: Entry, start: int, end: int, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        stop = end if self.fault is None or self.fault.cut is None else min(end, start + self.fault.cut)
        for at in range(start, stop, PIECE):
            self.wfile.write(self.hub.store.read(entry, at, min(at + PIECE, stop)))
        if stop < end:
            raise _Gone


def _file(path: str, entry: Entry) -> dict[str, Any]:
    if not entry.large:
        return {"type": "file", "path": path, "size": entry.size, "oid": entry.oid}
    lfs = {"oid": entry.oid, "size": entry.size, "pointerSize": 134}
    return {"type": "file", "path": path, "size": entry.size, "oid": entry.oid[:40], "lfs": lfs}


def _folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
