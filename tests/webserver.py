"""A small web server with byte ranges and faults on demand, on the loopback."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Asked:
    """One request as it came."""

    path: str
    start: int
    end: int | None
    token: str | None


@dataclass
class Fault:
    """What to do instead of a plain answer: a status, or an answer that breaks off after `cut` bytes."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    reset: bool = False


class FolderServer:
    """Serves `folder`. `faults` is asked before each request: None for a plain answer."""

    def __init__(self, folder: Path, *, ranges: bool = True) -> None:
        self.folder, self.ranges = folder, ranges
        self.asked: list[Asked] = []
        self.sent = 0
        self.fault: Callable[[Asked, int], Fault | None] = lambda asked, number: None
        self.redirect: Callable[[str], str | None] = lambda path: None
        self.headers: dict[str, str] = {}
        """Added to every file."""
        self.strip: Callable[[str], str] = lambda path: path.lstrip("/")
        """Path of a request -> file in the folder."""
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> FolderServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        start, end = (int(found[1]), int(found[2]) + 1 if found[2] else None) if found else (0, None)
        asked = Asked(request.path, start, end, request.headers.get("Authorization"))
        with self._lock:
            self.asked.append(asked)
            number = len(self.asked)
        if (target := self.redirect(request.path)) is not None:
            self._plain(request, 302, {"Location": target})
            return
        fault = self.fault(asked, number)
        if fault is not None and fault.status:
            self._plain(request, fault.status, fault.headers)
            return
        path = self.folder / self.strip(request.path.split("?")[0])
        if not path.is_file():
            self._plain(request, 404, {})
            return
        self._send(request, path, asked, fault if found and self.ranges else None, bool(found))

    def _send(
        self, request: BaseHTTPRequestHandler, path: Path, asked: Asked, fault: Fault | None, ranged: bool
    ) -> None:
        ranged, size = ranged and self.ranges, path.stat().st_size
        if ranged and asked.start >= size:
            self._plain(request, 416, {"Content-Range": f"bytes */{size}"})
            return
        with path.open("rb") as file:
            if ranged:
                file.seek(asked.start)
            part = file.read(min(asked.end or size, size) - asked.start if ranged else -1)
        request.send_response(206 if ranged else 200)
        for name, value in {"Content-Length": str(len(part)), **self.headers}.items():
            request.send_header(name, value)
        if ranged:
            request.send_header("Content-Range", f"bytes {asked.start}-{asked.start + len(part) - 1}/{size}")
        request.end_headers()
        cut = fault.cut if fault is not None else None
        with self._lock:
            self.sent += len(part[:cut])
        try:
            request.wfile.write(part[:cut])
        except OSError:
            request.close_connection = True
            return
        if cut is not None:
            if fault is not None and fault.reset:
                request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.close_connection = True

    def _plain(self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            request.send_header(name, value)
        request.end_headers()
