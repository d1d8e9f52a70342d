"""What a running server does that makes its tok/s mean something else: hints, which never end an evaluation."""

from __future__ import annotations

import asyncio
from typing import Any

from eagle3_data.errors import Eagle3Error
from eagle3_data.server.client import ServerClient
from eagle3_data.train.evaluate import EvalConfig


def hints(url: str, config: EvalConfig) -> list[str]:
    """One line each; none for a server that says nothing of itself (some way in between passes on /generate alone)."""
    info = asyncio.run(_server_info(url, config))
    found = []
    limits = [int(n) for state in _states(info) if (n := state.get("effective_max_running_requests_per_dp"))]
    if limits and sum(limits) < config.concurrency:
        found.append(
            f"{url} takes {sum(limits)} requests at once, the others of {config.concurrency} wait: "
            "start it with --max-running-requests"
        )
    if config.rounds > 1 and info.get("disable_radix_cache") is False:
        found.append(
            f"{url} keeps prompts in a prefix cache, so rounds after the first skip their prefill: "
            "start it with --disable-radix-cache"
        )
    return found


def _states(info: dict[str, Any]) -> list[dict[str, Any]]:
    return info.get("internal_states") or []


async def _server_info(url: str, config: EvalConfig) -> dict[str, Any]:
    async with ServerClient(url, api_key=config.api_key) as client:
        try:
            return await client.server_info()
        except Eagle3Error:
            return {}
