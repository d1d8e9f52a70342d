"""Whole builds against the real server: what is in the shards is what transformers says of each sample's own ids."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_data.builders.build import build
from eagle3_data.builders.pool import FlowConfig
from eagle3_data.builders.settings import BuildConfig, BuildReport
from eagle3_data.errors import RequestTimeout
from eagle3_data.manifest import Manifest
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from eagle3_data.server.client import ServerClient
from eagle3_data.shards import ShardSet
from eagle3_data.verify import verify
from tests.models import expected_states
from tests.servers import RunningServer, prompt

pytestmark = pytest.mark.server


def rows_file(path: Path, prompts: list[list[int]]) -> Path:
    rows = [{"id": f"p{i}", "input_ids": ids, "loss_mask": [0, *[1] * (len(ids) - 1)]} for i, ids in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(server: RunningServer, samples: Path, out: Path, **changes: Any) -> BuildReport:
    flow = FlowConfig(max_inflight=changes.pop("max_inflight", 16), **changes.pop("flow", {}))
    config = BuildConfig(
        out=out,
        inputs=(str(samples),),
        model=str(server.model),
        servers=(server.url,),
        api_key=server.api_key,
        shard_bytes=changes.pop("shard_bytes", 4 << 20),
        flow=flow,
        interval_s=0.5,
        **changes,
    )
    return build(config, on_tick=lambda tick: None, on_text=lambda text: None)


def check_states(server: RunningServer, folder: Path, prompts: list[list[int]]) -> None:
    """Every sample: its own ids, as many rows as ids, and transformers' states for these ids.

    To 1e-5: in a batch, matrix products of other heights may take another kernel. To the last bit: test_states.py.
    """
    data = ShardSet.open(folder)
    assert len(data) == len(prompts) == len(set(data.keys))
    for i, key in enumerate(data.keys):
        sample, ids = data.read(i), prompts[int(key)]
        assert sample[IDS].tolist() == ids
        assert len(sample[AUX]) == len(sample[LAST]) == len(sample[MASK]) == len(ids)
        expected = expected_states(server.model, ids)
        torch.testing.assert_close(sample[AUX], expected.aux(data.capture.layers), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(sample[LAST], expected.hidden[-1], atol=1e-5, rtol=1e-5)
        assert int(data.index["next_token"][i].as_py()) == int(expected.logits[-1].argmax())


async def post_foreign(url: str, ids: list[list[int]], until: asyncio.Event) -> int:
    """A client that knows nothing of us, with plain requests of the same length; how many it got answered."""
    answered = 0
    async with ServerClient(url) as client:
        while not until.is_set():
            await client.generate(ids[answered % len(ids)])
            answered += 1
    return answered


def test_c01_equal_lengths_and_a_foreign_client_no_swaps(llama_server: RunningServer, tmp_path: Path) -> None:
    """64 prompts of exactly 512 tokens, 16 in flight, while another client posts plain requests of 512 tokens."""
    prompts = [prompt(512, seed) for seed in range(64)]
    foreign = [prompt(512, 1000 + seed) for seed in range(8)]
    samples = rows_file(tmp_path / "rows.jsonl", prompts)

    async def both() -> tuple[BuildReport, int]:
        done = asyncio.Event()
        other = asyncio.create_task(post_foreign(llama_server.url, foreign, done))
        report = await asyncio.to_thread(run, llama_server, samples, tmp_path / "out")
        done.set()
        return report, await other

    report, answered = asyncio.run(both())
    assert report.complete
    assert (report.saved, report.failed, report.retried) == (64, {}, {})
    assert answered >= 1
    check_states(llama_server, tmp_path / "out", prompts)
    assert verify(tmp_path / "out").ok
    assert llama_server.files() == []


def test_a_stale_dump_of_an_earlier_run_is_never_adopted(llama_server: RunningServer, tmp_path: Path) -> None:
    """The first fault of the first system. The stale dumps are real, of the same lengths and even the same keys."""
    prompts, others = [prompt(40, s) for s in range(6)], [prompt(40, 50 + s) for s in range(6)]
    stale = [f"e3d-earlier-{i:08d}-0" for i in range(6)]

    async def leave() -> None:
        async with llama_server.client() as client:
            for rid, ids in zip(stale, others, strict=True):
                await client.prefill(ids, rid)

    asyncio.run(leave())
    wait_for(llama_server, stale)
    report = run(llama_server, rows_file(tmp_path / "rows.jsonl", prompts), tmp_path / "out")
    assert report.saved == 6
    assert report.adopted == 0
    check_states(llama_server, tmp_path / "out", prompts)
    assert llama_server.files() == [f"{rid}.safetensors" for rid in stale], "another run's dumps are not ours to remove"
    for rid in stale:
        (llama_server.spool / f"{rid}.safetensors").unlink()


def test_health_checks_in_the_middle_leave_nothing(llama_server: RunningServer, tmp_path: Path) -> None:
    """The second fault: the server's own prefills (warm-up, health) counted as dumps."""
    prompts = [prompt(30 + s, s) for s in range(24)]

    async def both() -> BuildReport:
        task = asyncio.create_task(
            asyncio.to_thread(run, llama_server, rows_file(tmp_path / "r.jsonl", prompts), tmp_path / "o")
        )
        while not task.done():
            await asyncio.to_thread(
                lambda: urllib.request.urlopen(f"{llama_server.url}/health_generate", timeout=60).read()
            )
            await asyncio.sleep(0.05)
        return await task

    assert asyncio.run(both()).saved == 24
    check_states(llama_server, tmp_path / "o", prompts)
    assert llama_server.files() == []


def test_a_dump_that_lands_late_is_thrown_away(
    llama_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third fault: given up after a short wait, asked for again; the late dump of the first try is nobody's."""
    prompts = [prompt(200, s) for s in range(6)]
    given_up: list[str] = []
    real = ServerClient.prefill

    async def hasty(client: ServerClient, ids: Any, rid: str) -> Any:
        if rid.endswith("-0") and len(given_up) < 3:
            given_up.append(rid)
            task = asyncio.ensure_future(real(client, ids, rid))
            late.append(task)
            raise RequestTimeout("too slow for the test")
        return await real(client, ids, rid)

    late: list[Any] = []
    monkeypatch.setattr(ServerClient, "prefill", hasty)
    report = run(llama_server, rows_file(tmp_path / "r.jsonl", prompts), tmp_path / "out")
    assert report.saved == 6
    assert report.retried == {"timeout": 3}
    check_states(llama_server, tmp_path / "out", prompts)
    run_id = Manifest.load(tmp_path / "out").run
    left = [name for name in llama_server.files() if run_id in name]
    assert report.swept + len(left) == 3, "each late dump was thrown away, or lies in the spool unread"
    for name in left:
        (llama_server.spool / name).unlink()


def test_resumed_and_disturbed_builds_have_the_same_bytes(llama_server: RunningServer, tmp_path: Path) -> None:
    """Invariants 6 and 7 on the real server; one prompt in flight, since batches may change the last bits of states."""
    prompts = [prompt(20 + 7 * s, s) for s in range(40)]
    samples = rows_file(tmp_path / "rows.jsonl", prompts)
    calm = run(llama_server, samples, tmp_path / "calm", max_inflight=1, shard_bytes=1 << 20)
    driver = (
        "import sys; from pathlib import Path; from eagle3_data.cli import main; "
        f"sys.argv = ['eagle3-data', 'build', {str(samples)!r}, '--model', {str(llama_server.model)!r}, "
        f"'--server', {llama_server.url!r}, '--out', {str(tmp_path / 'wild')!r}, '--shard-size', '1MiB', "
        "'--max-inflight', '1']; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not list((tmp_path / "wild").glob("data/*.tar")) and time.monotonic() < end and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    wild = run(llama_server, samples, tmp_path / "wild", max_inflight=1, shard_bytes=1 << 20)
    assert wild.complete
    assert calm.complete
    assert (wild.saved, wild.planned, sum(wild.failed.values()), sum(wild.skipped.values())) == (40, 40, 0, 0)
    files = {
        name: {path.name: path.read_bytes() for path in (tmp_path / name / "data").iterdir()}
        for name in ("calm", "wild")
    }
    assert files["calm"] == files["wild"]
    check_states(llama_server, tmp_path / "wild", prompts)


def test_stored_states_give_the_servers_own_top_1(llama_server: RunningServer, tmp_path: Path) -> None:
    """Invariant 3 from the shards: the stored last state times the target's head, against what the server reports."""
    from safetensors.torch import load_file

    prompts = [prompt(120, 7), prompt(65, 8)]
    run(llama_server, rows_file(tmp_path / "rows.jsonl", prompts), tmp_path / "out")
    head = load_file(llama_server.model / "model.safetensors")["lm_head.weight"]

    async def tops(ids: list[int]) -> list[int]:
        async with llama_server.client() as client:
            reply = await client.generate(ids, top_logprobs=1)
        inner = [entry[0][1] for entry in reply.meta["input_top_logprobs"][1:]]
        return [*inner, reply.meta["output_top_logprobs"][0][0][1]]

    data = ShardSet.open(tmp_path / "out")
    for i, ids in enumerate(prompts):
        ours = (data.read(i, (LAST,))[LAST] @ head.T).argmax(-1).tolist()
        assert ours == asyncio.run(tops(ids))
        assert ours[-1] == data.index["next_token"][i].as_py()


def test_c05_prompts_with_one_long_prefix_are_whole(llama_server: RunningServer, tmp_path: Path) -> None:
    """Prompts of 1,200 tokens share the first 1,000; a prefix cache would leave 200 rows of all but the first."""
    shared = prompt(1000, 5)
    prompts = [[*shared, *prompt(200, seed)] for seed in (6, 7)]
    report = run(llama_server, rows_file(tmp_path / "rows.jsonl", prompts), tmp_path / "out", max_inflight=2)
    assert (report.saved, report.retried) == (2, {})
    check_states(llama_server, tmp_path / "out", prompts)


def test_c07_chunked_prefill_through_a_build(chunked_server: RunningServer, tmp_path: Path) -> None:
    """C07 in small: prompts around and far beyond the chunk size, one sample each, rows in order."""
    prompts = [prompt(n, 3) for n in (63, 64, 65, 128, 1000)]
    report = run(chunked_server, rows_file(tmp_path / "rows.jsonl", prompts), tmp_path / "out")
    assert report.saved == 5
    check_states(chunked_server, tmp_path / "out", prompts)
    assert Manifest.load(tmp_path / "out").servers[0].chunk_tokens == 64


def test_qwen3_through_a_build(qwen3_server: RunningServer, tmp_path: Path) -> None:
    """C10: the default layers of a Qwen3 are the outputs that the manifest names."""
    prompts = [prompt(n, 4) for n in (5, 100, 333)]
    run(qwen3_server, rows_file(tmp_path / "rows.jsonl", prompts), tmp_path / "out")
    check_states(qwen3_server, tmp_path / "out", prompts)
    spec = Manifest.load(tmp_path / "out").spec
    assert (spec.layers, spec.convention) == ((1, 3, 4), "output_of_layer")


def wait_for(server: RunningServer, rids: list[str]) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end and not all((server.spool / f"{rid}.safetensors").exists() for rid in rids):
        time.sleep(0.02)
    assert all((server.spool / f"{rid}.safetensors").exists() for rid in rids)
