"""What a running server does that makes its tok/s mean something else: hints, which never end an evaluation."""

from __future__ import annotations

import asyncio
from typing import Any

from eagle3_data.errors import Eagle3Error
from eagle3_data.server.client import ServerClient
from eagle3_data.train.measure import EvalConfig


def hints(url: str, config: EvalConfig) -> list[str]:
    """One line each; none for a server that says nothing of itself (some way in between passes on /generate alone)."""
    info = asyncio.run(_server_info(url, config))
    found = []
    states = [state for state in info.get("internal_states") or [] if isinstance(state, dict)]
    limits = [int(n) for state in states if (n := state.get("effective_max_running_requests_per_dp"))]
    if limits and sum(limits) < config.concurrency:
        found.append(
            f"{url} takes {sum(limits)} requests at once, the others of {config.concurrency} wait: "
            "start it with --max-running-requests"
        )
    if info.get("disable_radix_cache") is False:
        found.append(
            f"{url} keeps prompts in a prefix cache: those that it has seen before skip their prefill, "
            "in every round after the first and when it is evaluated again; start it with --disable-radix-cache"
        )
    return found


async def _server_info(url: str, config: EvalConfig) -> dict[str, Any]:
    async with ServerClient(url, api_key=config.api_key) as client:
        try:
            info: object = await client.server_info()
        except (Eagle3Error, ValueError):
            return {}
    return info if isinstance(info, dict) else {}
