"""Capture given prompts through a server and hand back their tensors."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from eagle3_data.protocol import DUMP_SUFFIX
from eagle3_data.server.client import Reply, ServerClient

WAIT_S = 60.0


def random_prompts(lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(8, vocab) for _ in range(length)] for length in lengths]


async def capture(
    url: str, spool: Path, prompts: Sequence[Sequence[int]], run: str, *, in_flight: int = 1
) -> list[tuple[Reply, dict[str, Tensor]]]:
    """Reply and dump (`aux_hidden_states`, `last_hidden_state`, `input_ids`) of each prompt, in order."""
    gate = asyncio.Semaphore(in_flight)
    async with ServerClient(url) as client:

        async def one(i: int) -> tuple[Reply, dict[str, Tensor]]:
            rid = f"e3d-{run}-{i:06d}-0"
            async with gate:
                reply = await client.prefill(prompts[i], rid)
                path = spool / f"{rid}{DUMP_SUFFIX}"
                async with asyncio.timeout(WAIT_S):
                    while not path.exists():
                        await asyncio.sleep(0.005)
                tensors = load_file(path)
                path.unlink()
                return reply, tensors

        return list(await asyncio.gather(*(one(i) for i in range(len(prompts)))))


def row_errors(found: Tensor, right: Tensor) -> Tensor:
    """||found - right|| / ||right|| of each row."""
    found, right = found.float().cpu(), right.float().cpu()
    return (found - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-20)


def relative(found: Tensor, right: Tensor) -> float:
    """Median of the rows' errors."""
    return float(row_errors(found, right).median())


@contextlib.contextmanager
def memory_folder(parent: Path) -> Iterator[Path]:
    """A folder that goes with the run; on a machine that others share, /dev/shm must not fill up."""
    with tempfile.TemporaryDirectory(prefix="eagle3-bench-", dir=parent) as folder:
        yield Path(folder)


def leftovers(spool: Path) -> list[str]:
    """What lies in the spool and should not: every prompt leaves one dump, and it was taken."""
    return sorted(p.name for p in spool.iterdir() if p.name != "eagle3.json" and not p.name.startswith(".server-"))
