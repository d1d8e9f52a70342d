"""Byte ranges over HTTP(S), received straight into memory that the caller owns.

The standard library's client, because it can receive into a given buffer. Connections are kept, one per thread and
host; redirects are followed, and credentials never leave the host that they are for. No URL with a query appears in a
message: signed links are secrets.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import http.client
import os
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from eagle3_data import __version__
from eagle3_data.errors import DatasetUnavailable, ShardCorrupt

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
CONNECT_S = 30.0
READ_S = 60.0
"""Without a byte for this long, the connection counts as broken."""
MAX_REDIRECTS = 5


class TransientError(Exception):
    """Worth another try, after `wait_s` seconds where the server said so."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class Response(http.client.HTTPResponse):
    """Adds a read that never holds back bytes that have come, so that a retry continues at the very byte."""

    def receive(self, view: memoryview) -> int:
        """Bytes put at the start of `view`; 0 at the end of the body."""
        if self.isclosed():
            return 0
        if self.chunked or self.length is None:
            return self.readinto(view)
        if not self.length:
            return 0
        count = self.fp.readinto1(view[: self.length])
        self.length -= count
        return int(count)


class HttpReader:
    """Opens ranges of URLs. `headers` are sent to `origin` alone. Threads may share one."""

    def __init__(self, origin: str, headers: Mapping[str, str] | None = None) -> None:
        self.origin, self._headers = _host(origin), dict(headers or {})
        self._local = threading.local()
        self._links: dict[str, str] = {}  # URL -> where it last redirected to

    def open(self, url: str, start: int = 0, end: int | None = None) -> HttpBody:
        """Bytes start..end of `url` (to its end when None).

        Raises TransientError where another try may help, ShardCorrupt when the file is shorter than that,
        DatasetUnavailable when it is not there, not allowed, or served without ranges.
        """
        link = self._links.get(url)
        if link is not None:
            body = self._open(url, link, start, end, refusals=(400, 401, 403, 404, 410))
            if body is not None:
                return body
            self._links.pop(url, None)  # the signed link has run out
        body = self._open(url, url, start, end, refusals=())
        assert body is not None
        return body

    def _open(self, url: str, link: str, start: int, end: int | None, refusals: tuple[int, ...]) -> HttpBody | None:
        """None when the status is one of `refusals`."""
        for _ in range(MAX_REDIRECTS):
            connection, response = self._request(link, start, end)
            if response.status in (301, 302, 303, 307, 308):
                target = response.headers.get("Location", "")
                _finish(connection, response)
                link = urllib.parse.urljoin(link, target)
                if urllib.parse.urlsplit(link).scheme not in ("http", "https"):
                    raise DatasetUnavailable(f"{public(url)} redirects to something that is not HTTP")
                continue
            if response.status in refusals:
                _finish(connection, response)
                return None
            try:
                _check(response, url, start, end)
            except BaseException:
                connection.close()
                raise
            if link != url:
                self._links[url] = link
            return HttpBody(connection, response, None if end is None else end - start)
        raise DatasetUnavailable(f"{public(url)} redirects more than {MAX_REDIRECTS} times")

    def _request(self, link: str, start: int, end: int | None) -> tuple[http.client.HTTPConnection, Response]:
        headers = {"User-Agent": f"eagle3-data/{__version__}", "Accept-Encoding": "identity"}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        if _host(link) == self.origin:
            headers.update(self._headers)
        parts = urllib.parse.urlsplit(link)
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        for fresh in (False, True):  # a kept connection may have been closed meanwhile: once more with a new one
            connection, kept, prefix = self._connection(link, fresh=fresh)
            try:
                connection.request("GET", prefix + target, headers=headers)
                response = connection.getresponse()
                assert isinstance(response, Response)
                return connection, response
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not kept or isinstance(error, TimeoutError):
                    raise TransientError(f"{type(error).__name__}: {error}") from error
        raise AssertionError("unreachable")

    def _connection(self, link: str, *, fresh: bool) -> tuple[http.client.HTTPConnection, bool, str]:
        """(connection, whether it was used before, what to put before the target: a plain proxy wants whole URLs)."""
        kept: dict[tuple[int, str], http.client.HTTPConnection] = self._local.__dict__.setdefault("kept", {})
        host, proxy = _host(link), _proxy(link)
        secure = host.startswith("https")
        prefix = host if proxy and not secure else ""
        place = (os.getpid(), host)
        if not fresh and place in kept and kept[place].sock is not None:
            return kept[place], True, prefix
        name = urllib.parse.urlsplit(proxy or link)
        kind: Any = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        options = {"context": _tls()} if secure else {}
        port = name.port or (443 if name.scheme == "https" else 80)
        connection: http.client.HTTPConnection = kind(name.hostname or "", port, timeout=CONNECT_S, **options)
        if proxy and secure:
            target = urllib.parse.urlsplit(link)
            connection.set_tunnel(target.hostname or "", target.port or 443)
        connection.response_class = Response
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            raise TransientError(f"{host}: {type(error).__name__}: {error}") from error
        connection.sock.settimeout(READ_S)
        kept[place] = connection
        return connection, False, prefix


class HttpBody:
    """One answer's bytes. `close` keeps the connection when all of them were read."""

    def __init__(self, connection: http.client.HTTPConnection, response: Response, wanted: int | None) -> None:
        self._connection, self._response, self.wanted = connection, response, wanted
        self.headers = response.headers
        self.length = response.length

    def receive(self, view: memoryview) -> int:
        """Bytes put at the start of `view`; 0 at the end. Raises TransientError when the connection broke."""
        try:
            return self._response.receive(view)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TransientError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        if self._response.length == 0 and not self._response.chunked:
            self._response.close()
        else:
            self._connection.close()


def public(url: str) -> str:
    """`url` without what may be secret: credentials and the query."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _check(response: Response, url: str, start: int, end: int | None) -> None:
    status = response.status
    if status in TRANSIENT:
        raise TransientError(f"HTTP {status}", retry_after(response.headers))
    if status == 416:
        raise ShardCorrupt(f"{public(url)} ends before byte {start}", next="the mirror is incomplete; push again")
    if status in (401, 403):
        raise DatasetUnavailable(f"{public(url)}: HTTP {status}", next="log in, or pass a token that may read it")
    if status in (404, 410):
        raise DatasetUnavailable(f"{public(url)} is not there (HTTP {status})", next="check the name and the revision")
    if status not in (200, 206):
        raise DatasetUnavailable(f"{public(url)}: HTTP {status} {response.reason}")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise DatasetUnavailable(f"{public(url)} comes compressed, so its offsets mean nothing")
    if status == 200 and start:
        raise DatasetUnavailable(
            f"{public(url)}: the server ignores byte ranges", next="serve the mirror with a server that has them"
        )
    if status == 206:
        found = response.headers.get("Content-Range", "")
        if not found.startswith(f"bytes {start}-"):
            raise DatasetUnavailable(f"{public(url)}: asked for bytes from {start}, got {found!r}")


def retry_after(headers: Mapping[str, Any] | http.client.HTTPMessage) -> float | None:
    """Seconds named by a Retry-After header: a number or a date."""
    text = str(headers.get("Retry-After") or "").strip()
    if not text:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(text))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    return None


def _finish(connection: http.client.HTTPConnection, response: Response) -> None:
    """Read a short body away, so that the connection can be used again; close it otherwise."""
    if response.length is None or response.length > 1 << 16:
        connection.close()
        return
    try:
        response.read()
    except (OSError, http.client.HTTPException):
        connection.close()


def _host(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2].lower()}"


def _proxy(link: str) -> str | None:
    parts = urllib.parse.urlsplit(link)
    proxy = urllib.request.getproxies().get(parts.scheme)
    return proxy if proxy and not urllib.request.proxy_bypass(parts.hostname or "") else None


@functools.lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    """The certificates that huggingface_hub's own client trusts."""
    import httpx

    return httpx.create_ssl_context()
