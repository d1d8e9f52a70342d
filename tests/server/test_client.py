"""Every way in which a server can fail, mapped to one of our errors. A scripted HTTP server plays SGLang's part."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import (
    ConfigError,
    ConnectionLost,
    DumpFailed,
    DumpMissing,
    RequestRejected,
    RequestTimeout,
    ServerError,
    ServerUnfit,
)
from eagle3_data.protocol import CaptureInfo, DumpError
from eagle3_data.server import client as client_module
from eagle3_data.server.client import Sampling, ServerClient
from eagle3_data.server.doctor import canary_lengths, diagnose, same_model
from eagle3_data.server.process import free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

INFO = CaptureInfo(
    protocol=1,
    plugin_version="0",
    sglang_version="0",
    instance="x",
    path="native",
    model_path="/models/tiny",
    layers=(1, 3, 4),
    convention="output_of_layer",
    norm="post",
    dtype="bfloat16",
    width=64,
    vocab_size=512,
    context_length=4096,
    tp_size=1,
    dp_size=1,
    chunk_tokens=-1,
    radix_cache=False,
    device="cpu",
    spool="/nowhere",
    free_bytes=1 << 40,
    high_water_bytes=1 << 30,
    backlog_bytes=0,
    dumps_written=0,
    dumps_failed=0,
)
ANSWER = {"output_ids": [5], "meta_info": {"prompt_tokens": 3, "finish_reason": {"type": "length"}}}


@asynccontextmanager
async def scripted(*, keepalive_s: float = 75.0, **routes: Handler) -> AsyncIterator[ServerClient]:
    """A server with the given handlers for `health`, `server_info`, `generate` and `dumps`."""
    app = web.Application()
    for name, handler in routes.items():
        path = "/eagle3/dumps/{rid}" if name == "dumps" else f"/{name}"
        app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, keepalive_timeout=keepalive_s)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        async with ServerClient(f"http://127.0.0.1:{port}/", timeout_s=1.0) as client:
            yield client
    finally:
        await runner.cleanup()


def answers(body: Any, status: int = 200) -> Handler:
    async def handler(_request: web.Request) -> web.Response:
        if isinstance(body, str):
            return web.Response(text=body, status=status)
        return web.json_response(body, status=status)

    return handler


async def resets(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    await asyncio.sleep(5)
    raise AssertionError


async def hangs(_request: web.Request) -> web.Response:
    await asyncio.sleep(5)
    raise AssertionError


@pytest.mark.parametrize(
    ("handler", "error", "words"),
    [
        (answers({"error": {"message": "input too long"}}, 400), RequestRejected, "input too long"),
        (answers({"error": "Unauthorized"}, 401), RequestRejected, "--api-key"),
        (answers("worker died", 500), ServerError, "worker died"),
        (answers({"error": {"message": "queue is full"}}, 503), ServerError, "queue is full"),
        (answers("<html>"), ServerError, "JSON"),
        (answers({"text": "x"}), ServerError, "something else"),
        (answers(["x"]), ServerError, "something else"),
        (resets, ConnectionLost, "no connection"),
        (hangs, RequestTimeout, "no answer in 1 s"),
    ],
)
def test_generate_maps_every_failure(handler: Handler, error: type[ServerError], words: str) -> None:
    async def work() -> None:
        async with scripted(generate=handler) as client:
            await client.prefill([1, 2, 3], "e3d-r-a-0")

    with pytest.raises(error, match=words) as raised:
        asyncio.run(work())
    assert type(raised.value) is error


def test_an_aborted_request_is_an_error() -> None:
    body = {"meta_info": {"prompt_tokens": 3, "finish_reason": {"type": "abort", "message": "out of memory"}}}

    async def work() -> None:
        async with scripted(generate=answers(body)) as client:
            await client.prefill([1, 2, 3], "e3d-r-a-0")

    with pytest.raises(ServerError, match="out of memory"):
        asyncio.run(work())


def test_what_generate_sends_and_returns() -> None:
    seen: list[Any] = []

    async def record(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response(ANSWER)

    async def work() -> None:
        async with scripted(generate=record) as client:
            reply = await client.prefill([1, 2, 3], "e3d-r-a-0")
            assert (reply.output_ids, reply.prompt_tokens, reply.finish_reason) == ((5,), 3, "length")
            sampling = Sampling(max_new_tokens=9, temperature=0.7, seed=3, stop_token_ids=(2,))
            await client.generate([1], sampling=sampling)

    asyncio.run(work())
    assert seen[0]["rid"] == "e3d-r-a-0"
    assert seen[0]["input_ids"] == [1, 2, 3]
    assert seen[0]["sampling_params"] == {"max_new_tokens": 1, "temperature": 0.0, "top_p": 1.0, "top_k": -1}
    assert "rid" not in seen[1]
    assert seen[1]["sampling_params"]["sampling_seed"] == 3


def test_an_idle_connection_that_the_server_drops_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang drops connections that were idle for five seconds; a busy client notices only when it sends."""
    monkeypatch.setattr(client_module, "KEEP_ALIVE_S", 0.2)

    async def work() -> None:
        async with scripted(keepalive_s=0.4, generate=answers(ANSWER)) as client:
            for _ in range(3):
                assert (await client.prefill([1, 2, 3], "e3d-r-a-0")).prompt_tokens == 3
                time.sleep(0.6)

    asyncio.run(work())


def test_no_server_and_no_url() -> None:
    async def work() -> None:
        async with ServerClient(f"http://127.0.0.1:{free_port()}") as client:
            await client.check_health()

    with pytest.raises(ConnectionLost, match="eagle3-data serve"):
        asyncio.run(work())
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        ServerClient("localhost:30000")


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([{"tp_size": 1}], "pip install eagle3-data"),
        ([], "SGLANG_PLUGINS"),
        ([{"eagle3": INFO.to_dict()}, {}], "does not capture"),
        ([{"eagle3": {**INFO.to_dict(), "protocol": 99}}], "protocol 99"),
        ([{"eagle3": {**INFO.to_dict(), "new": 1}}], "new"),
    ],
)
def test_servers_that_do_not_capture_are_unfit(states: list[Any], words: str) -> None:
    async def work() -> None:
        async with scripted(server_info=answers({"internal_states": states})) as client:
            await client.capture_infos()

    with pytest.raises(ServerUnfit, match=words):
        asyncio.run(work())


def test_dumps_over_http(tmp_path: Path) -> None:
    content = bytes(range(256)) * 70_000  # more than two pieces
    record = DumpError(rid="e3d-r-b-0", reason="disk", detail="full", instance="x")
    asked: list[float] = []

    async def dumps(request: web.Request) -> web.Response:
        rid = request.match_info["rid"]
        if rid == "e3d-r-a-0":
            asked.append(float(request.query["wait"]))
            if len(asked) > 1:
                return web.Response(body=content)
        if rid == "e3d-r-b-0":
            return web.json_response(json.loads(record.to_json()), status=409)
        if rid in ("e3d-r-a-0", "e3d-r-c-0"):
            return web.json_response({"error": f"no dump of {rid}"}, status=404)
        return web.json_response({"detail": "Not Found"}, status=404)

    async def work() -> None:
        async with scripted(dumps=dumps) as client:
            await client.fetch_dump("e3d-r-a-0", tmp_path / "a", wait_s=5)
            with pytest.raises(DumpFailed, match="disk: full"):
                await client.fetch_dump("e3d-r-b-0", tmp_path / "b", wait_s=5)
            with pytest.raises(DumpMissing, match="no dump"):
                await client.fetch_dump("e3d-r-c-0", tmp_path / "c", wait_s=0.1)
            with pytest.raises(ServerUnfit, match="no route for dumps"):
                await client.fetch_dump("e3d-r-d-0", tmp_path / "d", wait_s=5)

    asyncio.run(work())
    assert (tmp_path / "a").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert asked[0] <= 5


def test_a_dump_cut_off_on_the_way_is_not_stored(tmp_path: Path) -> None:
    async def dumps(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "1000"})
        await response.prepare(request)
        await response.write(b"x" * 100)
        assert request.transport is not None
        request.transport.abort()
        return response

    async def work() -> None:
        async with scripted(dumps=dumps) as client:
            await client.fetch_dump("e3d-r-a-0", tmp_path / "a", wait_s=5)

    with pytest.raises(ConnectionLost):
        asyncio.run(work())
    assert list(tmp_path.iterdir()) == []


def test_diagnosis_names_what_is_wrong() -> None:
    info = {**INFO.to_dict(), "radix_cache": True, "free_bytes": 10}
    expected = CaptureSpec(model="other", layers=(1, 3, 5), width=128, vocab_size=512)

    async def work() -> None:
        routes = {"health": answers("ok"), "server_info": answers({"internal_states": [{"eagle3": info}]})}
        async with scripted(**routes) as client:
            found = await diagnose(client.url, expected)
        failed = {check.name for check in found.checks if not check.ok}
        assert failed == {"radix cache", "spool space", "model", "layers", "width"}
        assert all(check.next for check in found.checks if not check.ok)
        with pytest.raises(ServerUnfit, match="radix cache"):
            found.raise_if_unfit()

    asyncio.run(work())


def test_diagnosis_of_what_is_not_there() -> None:
    async def work() -> None:
        missing = await diagnose(f"http://127.0.0.1:{free_port()}")
        assert [(check.name, check.ok) for check in missing.checks] == [("reachable", False)]
        async with scripted(health=answers("loading", 503)) as client:
            loading = await diagnose(client.url)
        assert [(check.name, check.ok) for check in loading.checks] == [("reachable", True), ("healthy", False)]
        async with scripted(health=answers("ok"), server_info=answers({"internal_states": [{}]})) as client:
            plain = await diagnose(client.url)
        assert [(check.name, check.ok) for check in plain.checks][-1] == ("patched", False)
        assert not plain.ok

    asyncio.run(work())


def test_canaries_reach_into_a_second_chunk_where_they_can() -> None:
    def lengths(chunk: int, context: int) -> list[int]:
        info = {**INFO.to_dict(), "chunk_tokens": chunk, "context_length": context}
        return canary_lengths(CaptureInfo.from_dict(info))

    assert lengths(-1, 4096) == [48, 97]
    assert lengths(2048, 4096) == [48, 2065]
    assert lengths(8192, 4096) == [48, 97]
    assert lengths(-1, 20) == [20, 20]


def test_model_names(tmp_path: Path) -> None:
    assert same_model("org/a", "org/a")
    assert same_model("/mnt/x/a", "/data/a")
    assert not same_model("org/a", "org/b")
