"""The real server's own render: our prompt ids are what its chat endpoint makes of the same conversation."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from eagle3_data.builders.samples.encode import make_encoder
from eagle3_data.builders.samples.input import FORMS, RawRow
from eagle3_data.builders.samples.mask import Masker
from eagle3_data.builders.samples.messages import Conversation, ServedRow
from eagle3_data.builders.samples.rows import RowRenderer
from eagle3_data.builders.samples.spec import SampleSpec
from eagle3_data.builders.samples.template import ChatTemplate
from tests.samples import conversations as talk
from tests.samples.kit import TEMPLATES

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]  # the first test waits for the server

NAMES = ["llama-3.1", "qwen3", "gpt-oss", "gemma-3", "deepseek-v3", "deepseek-v3.1", "kimi-k2.5"]

PIECES = [*"ab \n\té漢🦊<|>'1", "the ", "\n\n", "\n\n\n", "<|im_end|>"]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
reasonings = st.just("") | texts


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.load(response))


def server_ids(url: str, name: str, messages: list[dict[str, Any]], tools: Any, **kwargs: Any) -> list[int]:
    """`/tokenize` renders messages as the chat endpoint does, and says the ids."""
    template = (TEMPLATES / f"{name}.jinja").read_text()
    body = {"messages": messages, "chat_template_kwargs": {"chat_template": template, **kwargs}}
    if tools:
        body["tools"] = tools
    return list(post(url, "/tokenize", body)["tokens"])


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns.append(talk.user(draw(texts)))
        turns.append(talk.assistant(draw(texts), reasoning=draw(reasonings)))
    return turns


def check_against_server(
    url: str, tokenizer: PreTrainedTokenizerFast, name: str, turns: list[dict[str, Any]], tools: Any = None
) -> None:
    """Every sample begins with the ids that the server sends to the model for the turns it teaches."""
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    template = ChatTemplate(tokenizer)
    renderer = RowRenderer(Masker(template, SampleSpec()), make_encoder(tokenizer), FORMS[1])
    raw = RawRow(0, "row 0", {"messages": turns, "tools": tools})
    row = FORMS[1].parse(raw, raw.value())
    assert isinstance(row, Conversation)
    assert not isinstance(row, ServedRow)
    chunk = renderer.chunk([raw])
    starts, position = [], 0
    for count in chunk.tokens:
        mask = chunk.loss_mask[position : position + count]
        ids = chunk.input_ids[position : position + count].tolist()
        starts += [(ids, at) for at in range(1, count) if mask[at] and not mask[at - 1]]
        position += count
    spoken = [at for at in row.assistant_turns if not row.messages[at].is_empty]
    if chunk.drops:
        assert {drop.reason for drop in chunk.drops} <= {"nothing to learn"}
        return
    assert len(starts) == len(spoken)
    for at, (ids, start) in zip(spoken, starts, strict=True):
        thinking = renderer.masker.thinking_of(row.messages[at])
        history = [dict(turn) for turn in turns[:at]]
        for turn in history:
            if not turn.get("reasoning_content", "").strip():
                turn.pop("reasoning_content", None)  # blank reasoning is left out
        kwargs = dict(renderer.masker.thinking_kwargs(thinking))
        assert ids[:start] == server_ids(url, name, history, tools, **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_random_conversations(server: str, every_tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(conversations())
    @example([talk.user(""), talk.assistant("a", reasoning="\n\n")])
    @example([talk.user(""), talk.assistant("", reasoning="\n\n")])
    @example([talk.user(""), talk.assistant("a", reasoning=" ")])
    def run(turns: list[dict[str, Any]]) -> None:
        check_against_server(server, every_tokenizer, name, turns)

    run()


@pytest.mark.parametrize("name", ["llama-3.1", "qwen3", "kimi-k2.5"])
def test_tool_calls(server: str, every_tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    turns = talk.ONE_CALL if name == "llama-3.1" else talk.PARALLEL_CALLS
    check_against_server(server, every_tokenizer, name, turns, tools=talk.TOOLS)


def test_tool_schemas_as_this_server_dumps_them(server: str, every_tokenizer: PreTrainedTokenizerFast) -> None:
    """Fields that a client leaves out appear in the prompt, in the server's order."""
    functions: list[dict[str, Any]] = [
        {"name": "bare"},
        {"parameters": {"type": "object"}, "name": "turned", "description": "round", "strict": True},
        {"name": "extra", "description": "d", "unknown": 1, "strict": None},
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    check_against_server(server, every_tokenizer, "qwen3", talk.PARALLEL_CALLS, tools=tools)


def test_the_chat_endpoint_reports_the_same_ids(server: str, every_tokenizer: PreTrainedTokenizerFast) -> None:
    """`/tokenize` is no path of its own: the chat endpoint itself reports these prompt ids."""
    messages = talk.SYSTEM[:-1]
    body = {
        "model": "default",
        "messages": messages,
        "max_tokens": 1,
        "return_prompt_token_ids": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    choice = post(server, "/v1/chat/completions", body)["choices"][0]
    assert choice["prompt_token_ids"] == server_ids(server, "qwen3", messages, None, enable_thinking=False)
    assert every_tokenizer.decode(choice["prompt_token_ids"]).endswith("<think>\n\n</think>\n\n")
