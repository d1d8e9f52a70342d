"""How a dump is proven to belong to a request: one interface, two ways.

`identity`: the dump names its request (our plugin). `token_count`: dumps carry no identity (an older patch that writes
folders `req_*`), so the count is the whole proof and the scheduler must keep it unambiguous.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

if TYPE_CHECKING:
    from eagle3_data.builders.dumps import Dump, Request

Strength = Literal["identity", "token_count"]
STRENGTHS: tuple[Strength, ...] = get_args(Strength)


class Matcher(Protocol):
    """Per server. `may_send` -> `sent` -> `take` -> `drop`, in this order for each request."""

    strength: Strength

    def may_send(self, tokens: int) -> bool:
        """False while a request of this length would be ambiguous on this server."""

    def sent(self, request: Request) -> None:
        """Called right before the request goes out."""

    async def take(self, request: Request, deadline_s: float) -> Dump:
        """The request's dump, proven. Raises DumpMissing, DumpFailed, DumpMismatch, DumpCorrupt, NonFinite."""

    async def drop(self, request: Request, *, came: bool) -> None:
        """The request is over; remove its dump. `came`: its response and dump were seen."""


_HOMES = {
    "identity": ("eagle3_data.builders.matching.identity", "IdentityMatcher"),
    "token_count": ("eagle3_data.builders.matching.token_count", "TokenCountMatcher"),
}


def matcher_class(strength: Strength) -> Any:
    """The class behind a name; torch loads here, not on `import eagle3_data.builders`."""
    module, name = _HOMES[strength]
    return getattr(importlib.import_module(module), name)
