"""The dump names its request: file name, request id and ids digest inside, all checked."""

from __future__ import annotations

import asyncio

from eagle3_data.builders.dumps import Dump, Request, open_dump
from eagle3_data.builders.matching import Strength
from eagle3_data.builders.spool import Spool
from eagle3_data.capture import CaptureSpec


class IdentityMatcher:
    """Any number of requests in flight, of any lengths."""

    strength: Strength = "identity"

    def __init__(self, spool: Spool, spec: CaptureSpec) -> None:
        self.spool, self.spec = spool, spec

    def may_send(self, tokens: int) -> bool:
        return True

    def sent(self, request: Request) -> None:
        pass

    async def take(self, request: Request, deadline_s: float) -> Dump:
        path = await self.spool.wait(str(request.rid), deadline_s)
        return await asyncio.to_thread(open_dump, path, request, self.spec)

    async def drop(self, request: Request, *, came: bool) -> None:
        await self.spool.remove(str(request.rid))
