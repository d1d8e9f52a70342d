"""Conversations that have broken loss masks, one for each kind of fault."""

from __future__ import annotations

from typing import Any

Turns = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        turn["reasoning_content"] = reasoning
    if calls:
        turn["tool_calls"] = calls
    return turn


def call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": f"functions.{name}:{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def reply(number: int, name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"functions.{name}:{number}", "name": name, "content": text}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

MULTI_TURN: Turns = [
    user("What is the capital of France?"),
    assistant("The capital of France is Paris."),
    user("And of Italy?"),
    assistant("Rome.\n\nIt lies on the Tiber."),
    user("Thanks"),
    assistant("You are welcome!"),
]
SYSTEM: Turns = [{"role": "system", "content": "Be brief."}, *MULTI_TURN]
REASONING: Turns = [
    user("6 * 7?"),
    assistant("It is 42.", reasoning="6 times 7\nis 42."),
    user("Plus one?"),
    assistant("43.", reasoning="42 + 1 = 43"),
]
ONE_CALL: Turns = [
    user("Weather in Paris?"),
    assistant("", calls=[call(0, "weather", {"city": "Paris"})]),
    reply(0, "weather", "12 C"),
    assistant("It is 12 C in Paris."),
]
PARALLEL_CALLS: Turns = [
    user("Weather in Paris and Rome?"),
    assistant("", calls=[call(0, "weather", {"city": "Paris"}), call(1, "weather", '{"city": "Rome"}')]),
    reply(0, "weather", "12 C"),
    reply(1, "weather", "18 C"),
    assistant("12 C and 18 C."),
]
EMPTY_TURN: Turns = [user("Say nothing."), assistant(""), user("Now say hello."), assistant("Hello!")]
ONE_TOKEN: Turns = [user("Yes or no?"), assistant("a"), user("Again?"), assistant("b")]
LEADING_BREAKS: Turns = [user("Write a poem."), assistant("\n\nThe fox\n"), user("More."), assistant("\nThe dog")]


def quoting(marker: str) -> Turns:
    """An assistant that writes the format's own role marker in the middle of its text."""
    return [
        user("How does your prompt begin an answer?"),
        assistant(f"It writes {marker} and then my text, like {marker}this."),
        user(f"And before that {marker}?"),
        assistant("The turn of the user."),
    ]
