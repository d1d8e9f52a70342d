"""A server that answers at once with states made from the ids: for faults and speed, where the real one cannot be used.

It speaks our protocol (info, generate, spool, dump endpoint) and can be told to misbehave. States are a function of the
ids alone, so two builds over it have the same dumps. Run it as a process with `python -m tests.replay SPOOL PORT`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from aiohttp import web

from eagle3_data.capture import CaptureSpec
from eagle3_data.protocol import (
    DUMP_SUFFIX,
    ERROR_SUFFIX,
    CaptureInfo,
    DumpError,
    DumpMeta,
    RequestId,
    dump_tensors,
    ids_digest,
    instance_marker,
    safetensors_header,
)

SPEC = CaptureSpec(model="replay", layers=(1, 3, 4), width=32, dtype="float32", vocab_size=2048)


@dataclass
class Faults:
    """What goes wrong: `reply[n]` and `dump[n]` act on the n-th request of ours (from 0); `every` on all."""

    reply: dict[int, str] = field(default_factory=dict)
    """'500', 'reset', 'hang', '400', 'short' (counts one token less)."""
    dump: dict[int, str] = field(default_factory=dict)
    """'nan', 'none', 'late', 'truncated', 'other_ids', 'other_rid', 'fewer_rows', 'flipped_byte', 'error' (the
    server's disk is full), 'failed' (it could not dump this one)."""
    share: float = 0.0
    """Of the requests that get a random fault of `kinds`."""
    kinds: tuple[str, ...] = ("500", "reset", "hang")
    late_s: float = 1.0
    seed: int = 0


def states(ids: list[int], spec: CaptureSpec) -> tuple[bytes, bytes]:
    """Aux and last state bytes, a function of the ids."""
    seed = int.from_bytes(hashlib.blake2b(np.array(ids, "<i4").tobytes(), digest_size=8).digest(), "little")
    generator = np.random.default_rng(seed)
    width = spec.width
    if spec.dtype == "bfloat16":
        draw = lambda w: (generator.integers(0, 0x4000, (len(ids), w), dtype=np.uint16)).tobytes()  # noqa: E731
    else:
        draw = lambda w: generator.standard_normal((len(ids), w), dtype=np.float32).tobytes()  # noqa: E731
    return draw(len(spec.layers) * width), draw(width)


class ReplayServer:
    """Start with `with ReplayServer(spool) as server: server.url`."""

    def __init__(self, spool: Path, spec: CaptureSpec = SPEC, faults: Faults | None = None, **info: Any) -> None:
        spool.mkdir(parents=True, exist_ok=True)
        self.spool, self.spec, self.faults = spool, spec, faults or Faults()
        self.instance = f"replay{random.getrandbits(40):x}"
        self.info_changes = info
        self.requests: list[str] = []
        self.lengths: Counter[int] = Counter()
        self.inflight_lengths: Counter[int] = Counter()
        self.most_of_a_length = 0
        self.legacy = False
        """Write `req_*` folders without identity, as the older patch did."""
        self.delay_s = 0.0
        self.head: npt.NDArray[np.float32] | None = None
        """[V, W]: the top-1 token of a dump is then that of its last state, as a real server's is."""
        self._random = random.Random(self.faults.seed)
        self._tasks: set[asyncio.Task[None]] = set()

    # ---------------------------------------------------------------- the server's side

    def info(self) -> dict[str, Any]:
        spec = self.spec
        info = CaptureInfo(
            protocol=1,
            plugin_version="replay",
            sglang_version="replay",
            instance=self.instance,
            path="native",
            model_path=spec.model,
            layers=spec.layers,
            convention=spec.convention,
            norm=spec.norm,
            dtype=spec.dtype,
            width=spec.width,
            vocab_size=spec.vocab_size,
            context_length=4096,
            tp_size=1,
            dp_size=1,
            chunk_tokens=-1,
            radix_cache=False,
            device="cpu",
            spool=str(self.spool),
            free_bytes=1 << 40,
            high_water_bytes=1 << 30,
            backlog_bytes=0,
            dumps_written=len(self.requests),
            dumps_failed=0,
        ).to_dict()
        return {**info, **self.info_changes}

    async def on_info(self, request: web.Request) -> web.Response:
        state = {} if self.legacy else {"eagle3": self.info()}
        return web.json_response({"internal_states": [state]})

    async def on_health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def on_generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids, rid = body["input_ids"], body.get("rid")
        number = len(self.requests)
        self.requests.append(rid)
        self.lengths[len(ids)] += 1
        self.inflight_lengths[len(ids)] += 1
        self.most_of_a_length = max(self.most_of_a_length, self.inflight_lengths[len(ids)])
        try:
            fault = self.faults.reply.get(number, "")
            if not fault and self.faults.share and self._random.random() < self.faults.share:
                fault = self._random.choice(self.faults.kinds)
            await asyncio.sleep(self.delay_s)
            if fault == "hang":
                await asyncio.sleep(3600)
            if fault == "reset":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if fault in ("500", "400"):
                return web.json_response({"error": {"message": "injected"}}, status=int(fault))
            self.dump(rid, ids, self.faults.dump.get(number, ""))
            meta = {"prompt_tokens": len(ids) - (fault == "short"), "finish_reason": {"type": "length", "length": 1}}
            return web.json_response({"text": "", "output_ids": [7], "meta_info": meta})
        finally:
            self.inflight_lengths[len(ids)] -= 1

    def dump(self, rid: str, ids: list[int], fault: str) -> None:
        if self.legacy:
            self._write_legacy(ids, fault)
            return
        if RequestId.parse(rid) is None or fault == "none":
            return
        if fault == "late":
            task = asyncio.get_running_loop().create_task(self._late(rid, ids))
            self._tasks.add(task)
            return
        if fault in ("error", "failed"):
            reason = "disk" if fault == "error" else "internal"
            record = DumpError(rid=rid, reason=reason, detail="injected", instance=self.instance)
            (self.spool / f"{rid}{ERROR_SUFFIX}").write_text(record.to_json())
            return
        write_dump(self.spool, rid, ids, self.spec, self.instance, fault, self.head)

    async def _late(self, rid: str, ids: list[int]) -> None:
        await asyncio.sleep(self.faults.late_s)
        self.dump(rid, ids, "")

    def _write_legacy(self, ids: list[int], fault: str) -> None:
        if fault == "none":
            return
        if fault == "late":
            loop = asyncio.get_running_loop()
            loop.call_later(self.faults.late_s, self._write_legacy, ids, "")
            return
        aux, last = states(ids, self.spec)
        tensors = dump_tensors(
            tokens=len(ids), num_aux=len(self.spec.layers), width=self.spec.width, dtype=self.spec.dtype
        )[:2]
        folder = self.spool / f"req_{len(self.requests):06d}_{random.getrandbits(30):x}"
        folder.mkdir()
        (folder / "states.safetensors").write_bytes(safetensors_header(tensors) + aux + last)

    async def on_fetch(self, request: web.Request) -> web.StreamResponse:
        path = self.spool / f"{request.match_info['rid']}{DUMP_SUFFIX}"
        for _ in range(100):
            if path.exists():
                return web.FileResponse(path)
            await asyncio.sleep(0.01)
        return web.Response(status=404, text=f"no dump of {request.match_info['rid']}")

    async def on_delete(self, request: web.Request) -> web.Response:
        (self.spool / f"{request.match_info['rid']}{DUMP_SUFFIX}").unlink(missing_ok=True)
        return web.Response(status=204)

    # ---------------------------------------------------------------- running it

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self.on_health)
        app.router.add_get("/server_info", self.on_info)
        app.router.add_post("/generate", self.on_generate)
        app.router.add_get("/eagle3/dumps/{rid}", self.on_fetch)
        app.router.add_delete("/eagle3/dumps/{rid}", self.on_delete)
        return app

    def __enter__(self) -> ReplayServer:
        started = threading.Event()
        instance_marker(self.spool, self.instance).touch()

        async def run() -> None:
            self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
            runner = web.AppRunner(self.app(), shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", getattr(self, "port", 0))
            await site.start()
            self.port = runner.addresses[0][1]
            started.set()
            await self._end.wait()
            await runner.cleanup()

        self._thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def top_token(last: bytes, spec: CaptureSpec, head: npt.NDArray[np.float32]) -> int:
    """Of the last row of a float32 state."""
    row = np.frombuffer(last, "<f4")[-spec.width :]
    return int((head @ row).argmax())


def write_dump(
    spool: Path,
    rid: str,
    ids: list[int],
    spec: CaptureSpec,
    instance: str = "x",
    fault: str = "",
    head: npt.NDArray[np.float32] | None = None,
) -> Path:
    """A dump in the server's format, or one with a fault."""
    stated = [*ids[:-1], (ids[-1] + 1) % spec.vocab_size] if fault == "other_ids" else ids
    rows = ids[:-1] if fault == "fewer_rows" else stated
    aux, last = states(rows, spec)
    meta = DumpMeta(
        rid="e3d-other-0-0" if fault == "other_rid" else rid,
        tokens=len(rows),
        ids_digest=ids_digest(rows),
        layers=spec.layers,
        width=spec.width,
        dtype=spec.dtype,
        norm=spec.norm,
        next_token=7 if head is None else top_token(last, spec, head),
        finite=fault != "nan",
        checksum=f"{xxhash.xxh3_128_hexdigest(aux)}:{xxhash.xxh3_128_hexdigest(last)}",
        instance=instance,
    )
    tensors = dump_tensors(tokens=len(rows), num_aux=len(spec.layers), width=spec.width, dtype=spec.dtype)
    data = safetensors_header(tensors, meta.to_strings()) + aux + last + np.array(rows, "<i4").tobytes()
    if fault == "truncated":
        data = data[: len(data) * 2 // 3]
    if fault == "flipped_byte":
        at = len(data) - len(last)
        data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    hidden, final = spool / f".{rid}.tmp", spool / f"{rid}{DUMP_SUFFIX}"
    hidden.write_bytes(data)
    os.rename(hidden, final)
    return final


def main() -> None:
    server = ReplayServer(Path(sys.argv[1]))
    server.port = int(sys.argv[2])
    server.delay_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    with server:
        print(json.dumps({"url": server.url}), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
