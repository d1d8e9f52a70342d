"""What does and does not get into the spool of a real server, and the dumps it hands out over HTTP."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import DumpFailed, DumpMissing, RequestRejected
from eagle3_data.protocol import DumpError
from eagle3_data.server.client import ServerClient
from eagle3_data.server.doctor import diagnose, inspect_dump
from tests.models import LAYERS, VOCAB, WIDTH
from tests.servers import RunningServer, captured, prompt, run


def test_warm_up_and_health_prefills_leave_nothing(llama_server: RunningServer) -> None:
    """A fresh server has been warmed up and asked for its health, both by prefills of their own."""

    async def ask() -> None:
        async with llama_server.client() as client:
            before = (await client.capture_infos())[0].dumps_written
            for _ in range(3):
                with urllib.request.urlopen(f"{llama_server.url}/health_generate", timeout=30) as response:
                    assert response.status == 200
            assert (await client.capture_infos())[0].dumps_written == before

    run(ask())
    assert llama_server.files() == []


@pytest.mark.parametrize(
    "rid", ["../x", "../e3d-r-a-0", "e3d-r-a-0/../../x", "e3d-r-a", "E3D-r-a-0", "e3d-r-a-0\n", "foreign", None]
)
def test_requests_that_are_not_ours_leave_nothing(llama_server: RunningServer, rid: str | None) -> None:
    outside = set(llama_server.spool.parent.iterdir())

    async def ask() -> None:
        async with llama_server.client() as client:
            await client.generate(prompt(20, 1), rid=rid)
            await client.prefill(prompt(20, 2), "e3d-after-it-0")  # by now the one before has been dealt with
            await captured(llama_server, "e3d-after-it-0")

    run(ask())
    assert llama_server.files() == []
    assert {path.name for path in set(llama_server.spool.parent.iterdir()) - outside if path.name == "x"} == set()


def test_a_rejected_prompt_leaves_nothing(llama_server: RunningServer) -> None:
    async def ask() -> None:
        async with llama_server.client() as client:
            with pytest.raises(RequestRejected, match="longer than"):
                await client.prefill(prompt(5000, 1), "e3d-long-a-0")
            await asyncio.sleep(0.5)

    run(ask())
    assert llama_server.files() == []


def test_generation_leaves_the_prompt_alone(llama_server: RunningServer) -> None:
    """Tokens that the server generates are not part of the dump."""
    ids = prompt(30, 5)

    async def ask() -> int:
        from eagle3_data.server.client import Sampling

        async with llama_server.client() as client:
            reply = await client.generate(ids, rid="e3d-gen-a-0", sampling=Sampling(max_new_tokens=8, ignore_eos=True))
        assert len(reply.output_ids) == 8
        meta, _ = await captured(llama_server, "e3d-gen-a-0")
        assert meta.next_token == reply.output_ids[0]
        return meta.tokens

    assert run(ask()) == 30
    assert llama_server.files() == []


def test_a_client_that_asks_for_hidden_states_disturbs_nobody(llama_server: RunningServer) -> None:
    """SGLang then replaces the states in its result by an unfinished copy; ours must be the originals."""
    from eagle3_data.protocol import AUX
    from tests.models import expected_states

    prompts = [prompt(100, seed) for seed in range(6)]

    async def nosy(client: ServerClient, number: int) -> None:
        body = {
            "input_ids": prompt(100, 50 + number),
            "return_hidden_states": True,
            "sampling_params": {"max_new_tokens": 1},
        }
        async with client._request("POST", "/generate", body=body, timeout_s=60) as response:
            assert (await response.json())["meta_info"]["hidden_states"]

    async def ask() -> None:
        async with llama_server.client() as client:
            ours = [client.prefill(ids, f"e3d-nosy-{i}-0") for i, ids in enumerate(prompts)]
            await asyncio.gather(*ours, *(nosy(client, i) for i in range(6)))
        for i, ids in enumerate(prompts):
            meta, tensors = await captured(llama_server, f"e3d-nosy-{i}-0")
            wanted = expected_states(llama_server.model, ids).aux(meta.layers)
            assert float((tensors[AUX] - wanted).abs().max() / wanted.abs().max()) < 1e-5

    run(ask())


def test_dumps_over_http(llama_server: RunningServer, tmp_path: Path) -> None:
    ids, rid = prompt(700, 1), "e3d-http-a-0"

    async def ask() -> None:
        async with llama_server.client() as client:
            (info,) = await client.capture_infos()
            waiting = asyncio.create_task(client.fetch_dump(rid, tmp_path / "dump", wait_s=30))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await client.prefill(ids, rid)
            await waiting
            assert inspect_dump(tmp_path / "dump", rid, ids, info) == []
            await client.delete_dump(rid)
            await client.delete_dump(rid)
            with pytest.raises(DumpMissing):
                await client.fetch_dump(rid, tmp_path / "again", wait_s=0.1)
            error = DumpError(rid=rid, reason="disk", detail="full", instance=info.instance)
            (llama_server.spool / f"{rid}.error.json").write_text(error.to_json())
            with pytest.raises(DumpFailed, match="disk: full"):
                await client.fetch_dump(rid, tmp_path / "again", wait_s=5)
            await client.delete_dump(rid)

    run(ask())
    assert llama_server.files() == []


@pytest.mark.parametrize("rid", ["..%2F..%2Fetc%2Fpasswd", "eagle3.json", "e3d-a-b-0%00", "x"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_the_dump_route_knows_request_ids_only(llama_server: RunningServer, method: str, rid: str) -> None:
    request = urllib.request.Request(f"{llama_server.url}/eagle3/dumps/{rid}", method=method)
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=10)
    assert raised.value.code in (400, 404)
    assert (llama_server.spool / "eagle3.json").exists()


def test_the_api_key_covers_the_dump_route(chunked_server: RunningServer, tmp_path: Path) -> None:
    ids, rid = prompt(30, 1), "e3d-key-a-0"

    async def ask() -> None:
        async with chunked_server.client() as client, ServerClient(chunked_server.url) as stranger:
            await client.prefill(ids, rid)
            await client.fetch_dump(rid, tmp_path / "dump", wait_s=10)
            for attempt in (
                stranger.fetch_dump(rid, tmp_path / "stolen", wait_s=1),
                stranger.delete_dump(rid),
                stranger.server_info(),
                stranger.prefill(ids, "e3d-key-b-0"),
            ):
                with pytest.raises(RequestRejected, match="--api-key"):
                    await attempt
            await client.delete_dump(rid)

    run(ask())
    assert not (tmp_path / "stolen").exists()


def test_the_doctor_finds_a_good_server_good(chunked_server: RunningServer) -> None:
    expected = CaptureSpec(
        model=str(chunked_server.model), layers=(1, 3, LAYERS - 4), width=WIDTH, dtype="float32", vocab_size=VOCAB
    )
    found = run(diagnose(chunked_server.url, expected, api_key=chunked_server.api_key))
    assert found.ok, found.checks
    names = [check.name for check in found.checks]
    assert "canary of 48 tokens" in names
    assert "canary of 81 tokens" in names  # more than a chunk of 64
    assert "seen from here" in found.checks[-1].detail
    assert chunked_server.files() == []
    locked = run(diagnose(chunked_server.url))
    assert [(check.name, check.ok) for check in locked.checks][-1] == ("patched", False)
    assert "--api-key" in locked.checks[-1].next


def test_the_doctor_falls_back_to_http(chunked_server: RunningServer) -> None:
    """Without the server's mark the folder may be another machine's of the same name."""
    (mark,) = chunked_server.spool.glob(".server-*")
    mark.unlink()
    try:
        found = run(diagnose(chunked_server.url, api_key=chunked_server.api_key))
    finally:
        mark.touch()
    assert found.ok, found.checks
    assert "over HTTP" in found.checks[-1].detail
    assert chunked_server.files() == []


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A small file system over `folder`, which its server goes on to write to."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no small file system to fill: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_spool_is_an_error_record_and_the_server_lives(llama_server: RunningServer) -> None:
    """1 MiB for dumps of 64 and 1,100 KiB: the first fits, the second does not, the third fits again."""

    async def ask() -> None:
        async with llama_server.client() as client:
            await client.prefill(prompt(60, 1), "e3d-full-a-0")
            await captured(llama_server, "e3d-full-a-0")
            await client.prefill(prompt(1100, 2), "e3d-full-b-0")
            record = llama_server.spool / "e3d-full-b-0.error.json"
            deadline = time.monotonic() + 20
            while not record.exists():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            error = DumpError.from_json(record.read_text())
            assert error.reason == "disk"
            assert "No space left" in error.detail
            record.unlink()
            await client.prefill(prompt(60, 3), "e3d-full-c-0")
            await captured(llama_server, "e3d-full-c-0")
            await client.check_health()

    with small_disk(llama_server.spool, 1):
        run(ask())
        assert llama_server.files() == []


def test_an_aborted_chunked_prompt_leaves_an_error_record(chunked_server: RunningServer) -> None:
    """The client goes away after some chunks: no temporary file stays, and no dump comes."""
    rid = "e3d-gone-a-0"

    async def ask() -> None:
        async with chunked_server.client() as client:
            task = asyncio.create_task(client.prefill(prompt(3900, 1), rid))
            deadline = time.monotonic() + 30
            while not any(name.endswith(".tmp") for name in chunked_server.files()):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.005)
            task.cancel()
            while any(name.endswith(".tmp") for name in chunked_server.files()):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    run(ask())
    (left,) = chunked_server.files()
    path = chunked_server.spool / left
    if left == f"{rid}.error.json":
        assert DumpError.from_json(path.read_text()).reason == "aborted"
    else:  # the prompt was through before the server heard of the abort: then the dump must be whole
        assert left == f"{rid}.safetensors"
        assert run(captured(chunked_server, rid))[0].tokens == 3900
    path.unlink(missing_ok=True)
