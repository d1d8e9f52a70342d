"""Invariants 1 to 4 against the real server: rows, identity, and every value of every state."""

from __future__ import annotations

import asyncio

import pytest
import torch

from eagle3_data.protocol import AUX, IDS, LAST, DumpMeta, default_aux_layers, ids_digest
from eagle3_data.server.client import Sampling
from eagle3_data.server.command import CAPTURING_REQUESTS
from tests.models import LAYERS, expected_states
from tests.servers import RunningServer, captured, prompt, rids, run

AUX_LAYERS = default_aux_layers(LAYERS)
LENGTHS = (63, 64, 65, 128, 1000)


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


async def capture_one(server: RunningServer, ids: list[int], rid: str) -> tuple[DumpMeta, dict[str, torch.Tensor], int]:
    async with server.client() as client:
        reply = await client.prefill(ids, rid)
    meta, tensors = await captured(server, rid)
    assert meta.rid == rid
    assert meta.tokens == reply.prompt_tokens == len(ids)
    assert meta.ids_digest == ids_digest(ids)
    assert meta.layers == AUX_LAYERS
    assert meta.finite
    assert meta.next_token == reply.output_ids[0]
    assert tensors[IDS].tolist() == ids
    assert tensors[IDS].dtype == torch.int32
    assert tensors[AUX].shape == (len(ids), 3 * meta.width)
    assert tensors[LAST].shape == (len(ids), meta.width)
    return meta, tensors, reply.output_ids[0]


def check_exact(server: RunningServer) -> None:
    for number, tokens in enumerate((1, 17, *LENGTHS)):
        ids = prompt(tokens, number)
        _, tensors, next_token = run(capture_one(server, ids, f"e3d-exact-{tokens}-0"))
        wanted = expected_states(server.model, ids)
        assert torch.equal(tensors[LAST], wanted.hidden[-1]), tokens
        assert torch.equal(tensors[AUX], wanted.aux(AUX_LAYERS)), tokens
        assert int(wanted.logits[-1].argmax()) == next_token


def test_more_than_48_prompts_are_taken_at_once(llama_server: RunningServer) -> None:
    """SGLang's own choice for a server that is told to speculate, as native capture is."""

    async def limits() -> list[int]:
        async with llama_server.client() as client:
            states = (await client.server_info())["internal_states"]
        return [state["effective_max_running_requests_per_dp"] for state in states]

    assert run(limits()) == [CAPTURING_REQUESTS]


def test_llama_states_equal_transformers_bit_for_bit(llama_server: RunningServer) -> None:
    check_exact(llama_server)


def test_qwen3_states_equal_transformers_bit_for_bit(qwen3_server: RunningServer) -> None:
    check_exact(qwen3_server)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_chunked_prompts_have_every_row_in_order(chunked_server: RunningServer, tokens: int) -> None:
    """Chunks of 64: one short, exactly one, one over, exactly two, many."""
    ids = prompt(tokens, 7)
    _, tensors, _ = run(capture_one(chunked_server, ids, f"e3d-chunk-{tokens}-0"))
    wanted = expected_states(chunked_server.model, ids)
    assert difference(tensors[LAST], wanted.hidden[-1]) < 1e-5
    assert difference(tensors[AUX], wanted.aux(AUX_LAYERS)) < 1e-5


def test_chunked_prompts_in_flight_together_stay_apart(chunked_server: RunningServer) -> None:
    prompts = [prompt(tokens, 20 + i) for i, tokens in enumerate((150, 40, 64, 200, 129, 63, 300, 65))]

    async def all_at_once() -> None:
        names = rids("mixed", prompts)
        await asyncio.gather(*(capture_one(chunked_server, ids, rid) for ids, rid in zip(prompts, names, strict=True)))

    run(all_at_once())
    assert chunked_server.files() == []


def check_equal_lengths(server: RunningServer, count: int, tokens: int, in_flight: int) -> None:
    """Prompts of one length beside a foreign client that posts the same length: only identity tells them apart."""
    prompts = [prompt(tokens, 1000 + i) for i in range(count)]
    found: dict[int, dict[str, torch.Tensor]] = {}

    async def ours(number: int, gate: asyncio.Semaphore) -> None:
        async with gate:
            _, found[number], _ = await capture_one(server, prompts[number], f"e3d-swap-{number:03d}-0")

    async def foreign(stop: asyncio.Event) -> int:
        sent = 0
        async with server.client() as client:
            while not stop.is_set():
                ids = prompt(tokens, 100_000 + sent)
                rid = [None, f"foreign-{sent}", f"../e3d-swap-{sent}-0", f"e3d-swap-{sent}-0/x"][sent % 4]
                await client.generate(ids, rid=rid, sampling=Sampling(max_new_tokens=3))
                sent += 1
        return sent

    async def both() -> int:
        gate, stop = asyncio.Semaphore(in_flight), asyncio.Event()
        others = [asyncio.create_task(foreign(stop)) for _ in range(1)]
        await asyncio.gather(*(ours(number, gate) for number in range(count)))
        stop.set()
        return sum(await asyncio.gather(*others))

    assert run(both()) > 0
    for number, ids in enumerate(prompts):
        wanted = expected_states(server.model, ids)
        assert difference(found[number][LAST], wanted.hidden[-1]) < 1e-5, number
        assert difference(found[number][AUX], wanted.aux(AUX_LAYERS)) < 1e-5, number
    assert server.files() == []


def test_no_swaps_among_prompts_of_512_tokens(llama_server: RunningServer) -> None:
    check_equal_lengths(llama_server, count=64, tokens=512, in_flight=16)


def test_last_state_times_head_is_the_servers_top_token_everywhere(llama_server: RunningServer) -> None:
    """Invariant 3, at all positions and not only the last one."""
    from safetensors.torch import load_file

    head = load_file(llama_server.model / "model.safetensors")["lm_head.weight"]
    ids, rid = prompt(300, 3), "e3d-head-top-0"

    async def ask() -> tuple[list[int], torch.Tensor]:
        async with llama_server.client() as client:
            reply = await client.generate(ids, rid=rid, top_logprobs=2)
        tops = [row[0][1] for row in reply.meta["input_top_logprobs"] if row] + [reply.output_ids[0]]
        _, tensors = await captured(llama_server, rid)
        return tops, tensors[LAST]

    tops, last = run(ask())
    assert len(tops) == len(ids)
    assert (last @ head.T).argmax(-1).tolist() == tops
