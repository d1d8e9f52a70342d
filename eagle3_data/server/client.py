"""HTTP to one SGLang server, patched or not: health, what it captures, generation, dumps. asyncio, aiohttp.

Every failure is one of `eagle3_data.errors`: ConnectionLost (refused, reset), RequestTimeout, RequestRejected (4xx,
with the server's own words), ServerError (5xx), ServerUnfit (not patched), DumpMissing, DumpFailed.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import aiohttp

from eagle3_data.errors import (
    ConfigError,
    ConnectionLost,
    DumpFailed,
    DumpMissing,
    RequestRejected,
    RequestTimeout,
    ServerError,
    ServerUnfit,
    SpoolFull,
)
from eagle3_data.protocol import DUMPS_ROUTE, SPOOL_ENV, CaptureInfo, DumpError, ProtocolError

PIECE_BYTES = 8 << 20
LONG_POLL_S = 30.0
"""Longest wait that one request for a dump asks the server for."""
QUICK_S = 30.0
"""Time limit of requests that the server answers without the model."""
KEEP_ALIVE_S = 2.0
UNPATCHED = (
    f"pip install eagle3-data beside SGLang, start it with {SPOOL_ENV}=FOLDER (or: eagle3-data serve), and name \
eagle3_data in SGLANG_PLUGINS if that is set"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the server chooses tokens; fields of SGLang's `sampling_params`."""

    max_new_tokens: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def to_params(self) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        if self.stop_token_ids:
            params["stop_token_ids"] = list(self.stop_token_ids)
        if self.ignore_eos:
            params["ignore_eos"] = True
        return params


PREFILL = Sampling()
"""One greedy token: all that capture needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One answer of `/generate`."""

    output_ids: tuple[int, ...]
    """Tokens the server generated, without the prompt."""
    prompt_tokens: int
    """Tokens of the prompt as the server counted them; fewer than were sent means that it cut the prompt."""
    finish_reason: str
    """'length', 'stop' or 'abort'."""
    meta: Mapping[str, Any]
    """SGLang's `meta_info`, whole: `spec_accept_length`, logprobs, `e2e_latency` and so on."""


class ServerClient:
    """One server. Safe for many requests at once within one event loop; close it, or use it as a context manager."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        """`timeout_s`: limit of one generation. Raises ConfigError for a URL that is none."""
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not a server's URL", next="write it as http://HOST:PORT")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ServerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ------------------------------------------------------------- the server itself

    async def check_health(self) -> None:
        """Return when the server says it can answer; raises ConnectionLost, RequestTimeout or ServerError."""
        async with self._request("GET", "/health", timeout_s=QUICK_S) as response:
            await response.read()

    async def server_info(self) -> dict[str, Any]:
        """SGLang's `/server_info`: its arguments, and `internal_states`, one per data-parallel rank."""
        async with self._request("GET", "/server_info", timeout_s=QUICK_S) as response:
            return cast(dict[str, Any], await response.json())

    async def capture_infos(self) -> list[CaptureInfo]:
        """What the server captures, one per data-parallel rank. Raises ServerUnfit when it is not patched."""
        states = (await self.server_info()).get("internal_states") or []
        infos = [state["eagle3"] for state in states if isinstance(state.get("eagle3"), dict)]
        if not infos or len(infos) < len(states):
            raise ServerUnfit(f"{self.url} is an SGLang server that does not capture", next=UNPATCHED)
        try:
            return [CaptureInfo.from_dict(info) for info in infos]
        except ProtocolError as error:
            raise ServerUnfit(f"{self.url}: {error}", next="install the same eagle3-data on both sides") from error

    # ------------------------------------------------------------- generation

    async def prefill(self, input_ids: Sequence[int], rid: str) -> Reply:
        """Have one prompt prefilled, and so captured; the dump may land after this returns."""
        return await self.generate(input_ids, rid=rid, sampling=PREFILL)

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        rid: str | None = None,
        sampling: Sampling = PREFILL,
        top_logprobs: int = 0,
        timeout_s: float | None = None,
    ) -> Reply:
        """Generate from one tokenised prompt.

        `top_logprobs` > 0 asks for that many alternatives at every position, of prompt and answer, in `meta`.
        """
        body: dict[str, Any] = {"input_ids": list(input_ids), "sampling_params": sampling.to_params()}
        if rid is not None:
            body["rid"] = rid
        if top_logprobs:
            body.update(return_logprob=True, logprob_start_len=0, top_logprobs_num=top_logprobs)
        async with self._request("POST", "/generate", body=body, timeout_s=timeout_s or self._timeout_s) as response:
            answer = await response.json()
        try:
            meta = answer["meta_info"]
            finish = meta["finish_reason"] or {}
            reply = Reply(
                output_ids=tuple(answer.get("output_ids") or ()),
                prompt_tokens=int(meta["prompt_tokens"]),
                finish_reason=str(finish.get("type", "")),
                meta=meta,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(f"{self.url} answered /generate with something else: {str(answer)[:200]}") from error
        if reply.finish_reason == "abort":
            raise ServerError(f"{self.url} aborted the request: {finish.get('message', 'no reason given')}")
        return reply

    # ------------------------------------------------------------- dumps over HTTP

    async def fetch_dump(self, rid: str, target: Path, *, wait_s: float) -> None:
        """Copy a dump into `target` (whole or not at all), waiting up to `wait_s` for it.

        Raises DumpMissing when it has not come by then, DumpFailed with the server's error record.
        """
        deadline = time.monotonic() + wait_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            path = f"{DUMPS_ROUTE.format(rid=rid)}?wait={min(left, LONG_POLL_S):.3f}"
            async with self._request("GET", path, timeout_s=self._timeout_s, expected=(200, 404, 409)) as response:
                if response.status == 200:
                    await _store(response, target)
                    return
                text = await response.text()
                if response.status == 409:
                    record = DumpError.from_json(text)
                    kind = SpoolFull if record.reason in ("disk", "pinned_full") else DumpFailed
                    raise kind(f"{self.url} could not capture {rid}: {record.reason}: {record.detail}")
                if "no dump of" not in text:  # the web framework's own 404
                    raise ServerUnfit(
                        f"{self.url} has no route for dumps",
                        next=f"{UNPATCHED}; with --tokenizer-worker-num > 1 only a shared spool works",
                    )
            if time.monotonic() >= deadline:
                raise DumpMissing(f"{self.url}: no dump of {rid} within {wait_s:.0f} s")

    async def delete_dump(self, rid: str) -> None:
        """Remove a dump, or its error record, from the server's spool; nothing happens when there is none."""
        async with self._request("DELETE", DUMPS_ROUTE.format(rid=rid), timeout_s=QUICK_S) as response:
            await response.read()

    # ------------------------------------------------------------- transport

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        body: Mapping[str, Any] | None = None,
        expected: tuple[int, ...] = (200, 204),
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request; anything but an expected status is raised as one of our errors, also while reading the body."""
        if self._session is None:
            # How many are in flight is the caller's business. SGLang drops a connection that was idle for five seconds;
            # a request sent on it just then would fail, so idle ones are dropped here first.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": "application/json"} if body is not None else None
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=QUICK_S)
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=limit
            ) as response:
                if response.status not in expected:
                    raise await _refusal(self.url, path, response)
                yield response
        except asyncio.TimeoutError as error:
            raise RequestTimeout(f"{self.url}{path}: no answer in {timeout_s:.0f} s") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise ConnectionLost(
                f"no connection to {self.url}: {error or type(error).__name__}",
                next="is the server running? start one with: eagle3-data serve --model MODEL",
            ) from error
        except aiohttp.ContentTypeError as error:
            raise ServerError(f"{self.url}{path} did not answer with JSON; is it an SGLang server?") from error
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"{self.url!r} is not a server's URL") from error


async def _refusal(url: str, path: str, response: aiohttp.ClientResponse) -> ServerError:
    """The error that an unexpected status stands for, with the server's own message."""
    message = _message(await response.text())
    what = f"{url}{path.partition('?')[0]}: HTTP {response.status}: {message}"
    if response.status in (401, 403):
        return RequestRejected(what, next="give the server's API key (--api-key)")
    if response.status == 408:
        return RequestTimeout(what)
    if response.status == 429 or response.status >= 500:
        return ServerError(what)
    return RequestRejected(what)


def _message(text: str) -> str:
    """The message in an error body, whichever of SGLang's forms it has."""
    try:
        body = json.loads(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        found = error.get("message", error) if isinstance(error, dict) else error
        return str(found)[:1000]
    except ValueError:
        return text.strip()[:1000] or "(empty body)"


async def _store(response: aiohttp.ClientResponse, target: Path) -> None:
    hidden = target.with_name(f".{target.name}.part")
    try:
        with hidden.open("wb") as file:
            async for piece in response.content.iter_chunked(PIECE_BYTES):
                await asyncio.to_thread(file.write, piece)
        os.rename(hidden, target)
    finally:
        hidden.unlink(missing_ok=True)
