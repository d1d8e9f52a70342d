"""Two ranks of the real server: one dump per prompt, whole and equal to transformers', whichever ranks made it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from eagle3_data.manifest import Manifest
from eagle3_data.protocol import AUX, LAST, CaptureInfo, DumpMeta
from eagle3_data.server.doctor import diagnose
from eagle3_data.verify import verify
from tests.models import expected_states
from tests.server import test_builds
from tests.server.test_states import AUX_LAYERS, capture_one, check_equal_lengths, difference
from tests.servers import RunningServer, prompt, rids, run

LENGTHS = (1, 17, 63, 64, 65, 300, 1000, 64, 2, 128, 500, 40)
"""In flight together: ranks with attention of their own have batches of different lengths, filled up to the longest."""


def check_lengths(server: RunningServer, run_id: str) -> list[DumpMeta]:
    """Sums over ranks come in another order than on one: to 1e-5, not bit for bit."""
    prompts = [prompt(tokens, 70 + i) for i, tokens in enumerate(LENGTHS)]

    async def all_at_once() -> list[tuple[DumpMeta, dict[str, torch.Tensor], int]]:
        names = rids(run_id, prompts)
        return await asyncio.gather(*(capture_one(server, ids, rid) for ids, rid in zip(prompts, names, strict=True)))

    found = run(all_at_once())
    for ids, (_, tensors, next_token) in zip(prompts, found, strict=True):
        wanted = expected_states(server.model, ids)
        assert difference(tensors[LAST], wanted.hidden[-1]) < 1e-5
        assert difference(tensors[AUX], wanted.aux(AUX_LAYERS)) < 1e-5
        assert int(wanted.logits[-1].argmax()) == next_token
    assert server.files() == []  # not one dump per rank
    return [meta for meta, _, _ in found]


def infos(server: RunningServer) -> list[CaptureInfo]:
    async def ask() -> list[CaptureInfo]:
        async with server.client() as client:
            return await client.capture_infos()

    return run(ask())


def test_tensor_parallel_ranks_make_one_dump_of_a_prompt(tp_server: RunningServer) -> None:
    made = check_lengths(tp_server, "tp")
    (info,) = infos(tp_server)
    assert (info.tp_size, info.dp_size) == (2, 1)
    assert {meta.instance for meta in made} == {info.instance}
    assert all(check.ok for check in run(diagnose(tp_server.url)).checks)


def test_tensor_parallel_prompts_of_one_length_stay_apart(tp_server: RunningServer) -> None:
    check_equal_lengths(tp_server, count=24, tokens=128, in_flight=12)


def test_ranks_with_attention_of_their_own_share_the_prompts(dp_server: RunningServer) -> None:
    made = check_lengths(dp_server, "dp")
    both = infos(dp_server)
    assert [(info.tp_size, info.dp_size) for info in both] == [(2, 2)] * 2
    assert {meta.instance for meta in made} == {info.instance for info in both}
    assert all(check.ok for check in run(diagnose(dp_server.url)).checks)


def test_data_parallel_prompts_of_one_length_stay_apart(dp_server: RunningServer) -> None:
    check_equal_lengths(dp_server, count=24, tokens=128, in_flight=12)


def test_a_build_takes_the_dumps_of_both_ranks(dp_server: RunningServer, tmp_path: Path) -> None:
    prompts = [prompt(20 + 13 * (i % 9), 300 + i) for i in range(24)]
    samples = test_builds.rows_file(tmp_path / "samples.jsonl", prompts)
    report = test_builds.run(dp_server, samples, tmp_path / "out")
    assert (report.saved, report.failed, report.retried, report.sent) == (24, {}, {}, 24)
    test_builds.check_states(dp_server, tmp_path / "out", prompts)
    assert verify(tmp_path / "out").ok
    servers = Manifest.load(tmp_path / "out").servers
    assert {(row.instance, row.dp_size) for row in servers} == {(info.instance, 2) for info in infos(dp_server)}
    assert dp_server.files() == []
