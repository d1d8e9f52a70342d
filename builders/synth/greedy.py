"""How much of existing answers is the target's own choice: its top-1 token at every learnt position."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from eagle3_data.builders.samples.store import Sample
from eagle3_data.errors import ServerError
from eagle3_data.server.client import ServerClient


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyShare:
    """Positions whose token the target would have chosen itself, given what stands before it."""

    samples: int
    positions: int
    equal: int

    @property
    def share(self) -> float:
        return self.equal / self.positions if self.positions else 0.0


def greedy_share(
    samples: Iterable[Sample], servers: Sequence[str], *, in_flight: int = 8, api_key: str | None = None
) -> GreedyShare:
    """Prefill every sample with log-probabilities and compare. Raises what the server's client raises.

    Answers written by the target at temperature 0 give about 1; written by people or another model, much less, and a
    draft trained on them learns to foresee someone else.
    """
    return asyncio.run(_all(samples, servers, in_flight, api_key))


async def _all(samples: Iterable[Sample], urls: Sequence[str], in_flight: int, api_key: str | None) -> GreedyShare:
    clients = [ServerClient(url, api_key=api_key) for url in urls]
    done: list[tuple[int, int]] = []
    tasks: set[asyncio.Task[tuple[int, int]]] = set()
    try:
        for number, sample in enumerate(samples):
            tasks.add(asyncio.create_task(_compare(sample, clients[number % len(clients)])))
            if len(tasks) >= in_flight:
                finished, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                done.extend(task.result() for task in finished)
        done.extend(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in clients))
    return GreedyShare(samples=len(done), positions=sum(p for p, _ in done), equal=sum(e for _, e in done))


async def _compare(sample: Sample, client: ServerClient) -> tuple[int, int]:
    """(learnt positions, those that equal the top-1 token)."""
    reply = await client.generate(sample.input_ids.tolist(), top_logprobs=1)
    tops = reply.meta.get("input_top_logprobs")
    if not isinstance(tops, list) or len(tops) != sample.tokens:
        found = len(tops) if isinstance(tops, list) else type(tops).__name__
        raise ServerError(f"{client.url}: {found} input log-probabilities for {sample.tokens} tokens")
    learnt = [at for at in np.flatnonzero(sample.loss_mask).tolist() if at > 0]
    return len(learnt), sum(tops[at][0][1] == sample.input_ids[at] for at in learnt)
