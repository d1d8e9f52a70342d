"""Tool schemas as the server's chat endpoint hands them to the template.

SGLang parses and dumps them again, so templates that print schemas as JSON see fields that the client never sent, and
which ones depends on the version. A prompt with tools is the served one only if ours has them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_data.builders.samples.spec import ToolSchemas


def served_tools(tools: Sequence[Mapping[str, Any]], form: ToolSchemas) -> tuple[Mapping[str, Any], ...]:
    """`sglang`: as 0.5.23 and newer dump them; `sglang-0.5.14`: as that does; `given`: untouched, as transformers."""
    if form == "given":
        return tuple(tools)
    dump = _function if form == "sglang" else _old_function
    return tuple(
        {
            "type": tool.get("type", "function"),
            "function": dump(tool["function"]),
            "defer_loading": tool.get("defer_loading"),
        }
        for tool in tools
    )


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    """The client's order, then what it left out; optional switches only when set."""
    known = {name: given.get(name) for name in ("description", "name", "parameters")}
    known |= {name: given[name] for name in ("strict", "defer_loading") if given.get(name) is not None}
    order = [name for name in given if name in known]
    return {name: known[name] for name in (*order, *(name for name in known if name not in order))}


def _old_function(given: Mapping[str, Any]) -> dict[str, Any]:
    """A fixed order, and `strict` always."""
    known = {name: given.get(name) for name in ("description", "name", "parameters")}
    known["strict"] = bool(given.get("strict", False))
    if given.get("defer_loading") is not None:
        known["defer_loading"] = given["defer_loading"]
    return known
