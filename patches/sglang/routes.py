"""`GET` and `DELETE /eagle3/dumps/{rid}` on SGLang's own HTTP port, for clients that do not see the spool.

Registered in the process that serves HTTP, before SGLang adds its API-key middleware, which therefore covers them. A
server without an API key gives dumps to this machine alone: states are the user's conversations, and `DELETE` is work
lost.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from eagle3_data.protocol import DUMP_SUFFIX, DUMPS_ROUTE, ERROR_SUFFIX, RequestId

PIECE_BYTES = 8 << 20
"""Dumps are sent in pieces of this size: 2.8 GB/s, where the web framework's own 64 KiB gave 0.42."""
LONGEST_WAIT_S = 60.0
POLL_S = 0.02
CLOSED = "dumps leave this machine only with an API key: start the server with --api-key, and give it to the client"


def add_routes(app: Any, spool: Path, *, keyed: bool) -> None:
    """Add both routes to SGLang's FastAPI application. `keyed`: the server has an API key, and checks it."""
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse

    async def get(request: Request) -> Response:
        """The dump; 404 while it is not there (`?wait=S` waits up to S seconds), 409 with its error record instead."""
        if not (keyed or is_local(request.client.host if request.client else "")):
            return JSONResponse({"error": CLOSED}, status_code=403)
        rid = RequestId.parse(request.path_params["rid"])
        wait_s = _wait(request.query_params.get("wait", "0"))
        if rid is None or wait_s is None:
            return JSONResponse({"error": "not a request id of eagle3-data, or `wait` is no number"}, status_code=400)
        dump, error = spool / f"{rid}{DUMP_SUFFIX}", spool / f"{rid}{ERROR_SUFFIX}"
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            file = _open(dump)
            if file is not None:
                size = os.fstat(file).st_size
                return StreamingResponse(
                    _pieces(file),
                    media_type="application/octet-stream",
                    headers={"content-length": str(size)},
                )
            if (record := _text(error)) is not None:
                return JSONResponse(json.loads(record), status_code=409)
            if asyncio.get_running_loop().time() >= deadline:
                return JSONResponse({"error": f"no dump of {rid}"}, status_code=404)
            await asyncio.sleep(POLL_S)

    async def delete(request: Request) -> Response:
        """Remove dump and error record; 204 also when neither was there."""
        if not (keyed or is_local(request.client.host if request.client else "")):
            return JSONResponse({"error": CLOSED}, status_code=403)
        rid = RequestId.parse(request.path_params["rid"])
        if rid is None:
            return JSONResponse({"error": "not a request id of eagle3-data"}, status_code=400)
        for suffix in (DUMP_SUFFIX, ERROR_SUFFIX):
            (spool / f"{rid}{suffix}").unlink(missing_ok=True)
        return Response(status_code=204)

    app.add_route(DUMPS_ROUTE, get, methods=["GET"])
    app.add_route(DUMPS_ROUTE, delete, methods=["DELETE"])


def is_local(host: str) -> bool:
    """Whether a peer's address is this machine's loopback; what is no address is not."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _wait(text: str) -> float | None:
    try:
        return min(max(float(text), 0.0), LONGEST_WAIT_S)
    except ValueError:
        return None


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


async def _pieces(file: int) -> AsyncIterator[bytes]:
    try:
        while data := await asyncio.to_thread(os.read, file, PIECE_BYTES):
            yield data
    finally:
        os.close(file)
