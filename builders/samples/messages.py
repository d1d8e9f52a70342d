"""One conversation, whatever form it came in: frozen turns in the OpenAI sense, and the dicts a chat template reads.

The dicts mirror what SGLang's chat endpoint hands to the template (no None fields, content never None, tool-call
arguments as objects), because the aim is the ids that serving sees.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from eagle3_data.errors import InputError

ASSISTANT = "assistant"

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

SHAREGPT_ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Where data sets keep an assistant's reasoning; the first that is there wins."""

ArgumentsForm = Literal["dict", "string"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of an assistant turn; `arguments` is always the parsed object."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None

    def to_dict(self, form: ArgumentsForm) -> dict[str, Any]:
        arguments = dict(self.arguments) if form == "dict" else json.dumps(self.arguments, ensure_ascii=False)
        call: dict[str, Any] = {"type": "function", "function": {"name": self.name, "arguments": arguments}}
        return {"id": self.id, **call} if self.id is not None else call


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `content` is text, or OpenAI text parts where the row has them."""

    role: str
    content: str | tuple[Mapping[str, Any], ...] = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    raw: str = ""
    """The content as it was, when a `<think>` block was taken out of it."""

    @property
    def inline(self) -> str:
        """Reasoning and answer as one text, for templates that know no reasoning field."""
        return self.raw or f"<think>\n{self.reasoning}\n</think>\n\n{self.text}"

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return " ".join(str(part["text"]) for part in self.content)

    @property
    def is_empty(self) -> bool:
        """An assistant turn that says, thinks and calls nothing."""
        return not (self.text or self.reasoning or self.tool_calls)

    def to_dict(self, *, reasoning_field: str, arguments: ArgumentsForm, parts: bool) -> dict[str, Any]:
        """The dict a template reads. `parts`: the template walks content parts, so they are kept."""
        keeps_parts = parts and self.role != "tool" and not isinstance(self.content, str)  # SGLang joins those of tools
        content = [dict(part) for part in self.content if isinstance(part, Mapping)] if keeps_parts else self.text
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            message[reasoning_field] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict(arguments) for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True)
class Conversation:
    """A row to render. `row` counts from 0 over all inputs and becomes the sample's key."""

    row: int
    id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    source: str | None = None

    @property
    def assistant_turns(self) -> tuple[int, ...]:
        return tuple(i for i, message in enumerate(self.messages) if message.role == ASSISTANT)

    def without_reasoning(self) -> Conversation:
        return replace(self, messages=tuple(replace(message, reasoning="") for message in self.messages))


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A row that already has ids (from `synth`): passed through, never tokenised again."""

    row: int
    id: str
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    source: str | None = None


Row = Conversation | ServedRow


def split_think(content: str) -> tuple[str, str]:
    """(reasoning, answer) of a text that starts with a `<think>` block, as raw outputs of reasoning models do."""
    head = content.lstrip()
    if not head.startswith("<think>"):
        return "", content
    reasoning, closed, answer = head[len("<think>") :].partition("</think>")
    return (reasoning.strip("\n") if reasoning.strip() else "", answer.lstrip("\n")) if closed else ("", content)


def parse_content(value: Any) -> str | tuple[Mapping[str, Any], ...]:
    """Text, or text parts. Raises InputError for images, audio and anything that is not text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in value]
        for part in parts:
            if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text"):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise InputError(f"content part of type {kind!r}; only text can become a sample")
        return tuple({"type": "text", "text": str(part["text"])} for part in parts)
    raise InputError(f"content is {type(value).__name__}, expected text")


def parse_tool_call(value: Any) -> ToolCall:
    """An OpenAI tool call or its bare function; arguments as an object or as JSON text of one."""
    if not isinstance(value, Mapping):
        raise InputError(f"tool call is {type(value).__name__}, expected an object")
    function = value.get("function", value)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError("tool call has no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise InputError(f"arguments of tool call {function['name']!r} are not JSON: {error}") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise InputError(f"arguments of tool call {function['name']!r} are {type(arguments).__name__}, not an object")
    call_id = value.get("id")
    return ToolCall(name=function["name"], arguments=dict(arguments), id=None if call_id is None else str(call_id))


def parse_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Tool schemas, each wrapped as `{"type": "function", "function": ...}`; a JSON text of the list is read too."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError as error:
            raise InputError(f"tools are not JSON: {error}") from error
    if not value:
        return ()
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise InputError("tools must be a list of objects")
    return tuple(dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in value)


def parse_message(value: Any) -> Message:
    """One OpenAI message. Raises InputError on an unknown role or content that is not text."""
    if not isinstance(value, Mapping):
        raise InputError(f"message is {type(value).__name__}, expected an object")
    role = str(value.get("role", "")).lower()
    if role not in ROLES:
        raise InputError(f"message role {value.get('role')!r} is not one of {', '.join(sorted(ROLES))}")
    content = parse_content(value.get("content"))
    reasoning = raw = ""
    if role == ASSISTANT:
        # Blank reasoning is none: some templates strip it and some do not, and nothing can be learnt from it.
        reasoning = next((str(value[name]) for name in REASONING_FIELDS if str(value.get(name) or "").strip()), "")
        if not reasoning and isinstance(content, str):
            raw, (reasoning, content) = content, split_think(content)
    return Message(
        role=role,
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(parse_tool_call(call) for call in value.get("tool_calls") or ()),
        name=value.get("name"),
        tool_call_id=value.get("tool_call_id"),
        raw=raw if raw != content else "",
    )


def parse_sharegpt_message(value: Any) -> Message:
    """One ShareGPT turn (`from`, `value`); `function_call` turns carry JSON calls."""
    if not isinstance(value, Mapping):
        raise InputError(f"turn is {type(value).__name__}, expected an object")
    speaker = str(value.get("from", "")).lower()
    if speaker not in SHAREGPT_ROLES:
        raise InputError(f"turn from {value.get('from')!r} is not one of {', '.join(sorted(SHAREGPT_ROLES))}")
    content = parse_content(value.get("value"))
    if speaker == "function_call":
        try:
            calls = json.loads(content) if isinstance(content, str) else None
        except ValueError as error:
            raise InputError(f"function_call turn is not JSON: {error}") from error
        calls = calls if isinstance(calls, list) else [calls]
        return Message(role=ASSISTANT, tool_calls=tuple(parse_tool_call(call) for call in calls))
    return parse_message({"role": SHAREGPT_ROLES[speaker], "content": content})
