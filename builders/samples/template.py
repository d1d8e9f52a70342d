"""The target's chat template as a function from messages to text, and what can be learnt of it by rendering.

Nothing here reads the template's source: switches, reasoning fields and argument forms are found by rendering small
conversations and comparing the results.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from eagle3_data.builders.samples.messages import REASONING_FIELDS, ArgumentsForm, Conversation, Message, ToolCall
from eagle3_data.errors import ConfigError, SampleError

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn thinking on and off (Qwen3, GLM; DeepSeek-V3.1, Kimi-K2.5)."""

THINK_FORMS = (("<think>\n", "\n</think>\n\n"), ("<think>", "</think>"))
"""Think blocks that generation prompts open, and how the model closes them (DeepSeek-R1, QwQ; DeepSeek-V3.1, Kimi)."""

PROBE = (Message(role="user", content="a"),)


class TemplateFailed(SampleError):
    """The template raised on this conversation (roles out of order, a field it needs)."""

    reason = "template"


class ChatTemplate:
    """Renders with the tokenizer's own `apply_chat_template`, or with its compiled template where that is the same."""

    def __init__(self, tokenizer: Any, *, kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self.kwargs = tokenizer, dict(kwargs or {})
        source = getattr(tokenizer, "chat_template", None)
        if not source and _is_stock(tokenizer):
            raise ConfigError(
                "the tokenizer has no chat template",
                next="samples need the template that serving uses; put chat_template.jinja beside the tokenizer",
            )
        self.source = source if isinstance(source, str) else json.dumps(source, sort_keys=True)
        self._compiled = _compiled(tokenizer) if isinstance(source, str) and _is_stock(tokenizer) else None
        if self._compiled is not None and not self._compiled_agrees():
            self._compiled = None

    def _compiled_agrees(self) -> bool:
        """Whether the quick way gives what `apply_chat_template` gives."""
        prompt = [message.to_dict(reasoning_field="", arguments="dict", parts=False) for message in PROBE]
        try:
            quick = self.render(prompt, generation=True)
        except TemplateFailed:
            return True  # a template that wants more than one message raises on either way
        variables = {**self.kwargs, "add_generation_prompt": True}
        return quick == str(self._tokenizer.apply_chat_template(prompt, tokenize=False, **variables))

    @cached_property
    def digest(self) -> str:
        """128-bit BLAKE2b of the template's source, as hex."""
        return hashlib.blake2b((self.source or "").encode(), digest_size=16).hexdigest()

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        generation: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text, ending with the generation prompt when `generation`. Raises TemplateFailed if the template does."""
        variables = {**self.kwargs, **(kwargs or {}), "add_generation_prompt": generation}
        try:
            return self._render(messages, list(tools), variables)
        except Exception as error:  # a template may raise anything at all
            flat = [tool.get("function", tool) for tool in tools]
            if flat:  # some templates take bare functions, which SGLang tries next
                with contextlib.suppress(Exception):
                    return self._render(messages, flat, variables)
            raise TemplateFailed(f"the chat template refuses the conversation: {_short(error)}") from error

    def _render(self, messages: Sequence[dict[str, Any]], tools: list[Any], variables: Mapping[str, Any]) -> str:
        if self._compiled is not None:
            return self._compiled({**variables, "messages": messages, "tools": tools or None, "documents": None})
        return str(self._tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **variables))

    @cached_property
    def thinking_switches(self) -> tuple[str, ...]:
        """The variables among THINKING_SWITCHES that change the generation prompt and are not set by the user."""
        return tuple(name for name in THINKING_SWITCHES if name not in self.kwargs and self._switch_matters(name))

    def _switch_matters(self, name: str) -> bool:
        prompt = [message.to_dict(reasoning_field="", arguments="dict", parts=False) for message in PROBE]
        try:
            on, off = (self.render(prompt, generation=True, kwargs={name: value}) for value in (True, False))
        except TemplateFailed:
            return False
        return on != off

    @property
    def reasoning_field(self) -> str:
        """The message field whose text the template renders as reasoning; `reasoning_content` when it renders none."""
        return self._reasoning_field or REASONING_FIELDS[0]

    @cached_property
    def _reasoning_field(self) -> str | None:
        call = ToolCall(name="f", arguments={}, id="c1")
        for turn in (
            Message(role="assistant", content="b", reasoning="r"),
            Message(role="assistant", reasoning="r", tool_calls=(call,)),
        ):
            for name in REASONING_FIELDS:
                try:
                    with_it = self._probe_turn(turn, name)
                    without = self._probe_turn(Message("assistant", turn.content, "", turn.tool_calls), name)
                except TemplateFailed:
                    continue
                if with_it != without:
                    return name
        return None

    @cached_property
    def _opens_think(self) -> bool:
        prompt = [message.to_dict(reasoning_field="", arguments="dict", parts=False) for message in PROBE]
        try:
            text = self.render(prompt, generation=True, kwargs=dict.fromkeys(self.thinking_switches, True))
        except TemplateFailed:
            return False
        return text.endswith(tuple(opener for opener, _ in THINK_FORMS))

    def _probe_turn(self, turn: Message, field: str) -> str:
        form = self.call_form[0]
        messages = [m.to_dict(reasoning_field=field, arguments=form, parts=False) for m in (*PROBE, turn)]
        return self.render(messages, generation=False)

    @cached_property
    def call_form(self) -> tuple[ArgumentsForm, str | None]:
        """How calls must be written to be rendered: form of their arguments, content of a turn that only calls.

        Objects and "", as SGLang passes them; JSON text or None for templates that take or see calls only so.
        """
        call = ToolCall(name="f", arguments={"k": "v"}, id="c1")
        forms: tuple[ArgumentsForm, ...] = ("dict", "string")
        for content in ("", None):
            for form in forms:
                if self._renders_call(call, form, content):
                    return form, content
        return "dict", ""

    def _renders_call(self, call: ToolCall, form: ArgumentsForm, content: str | None) -> bool:
        user = [m.to_dict(reasoning_field="", arguments=form, parts=False) for m in PROBE]
        silent = {"role": "assistant", "content": ""}
        try:
            with_call = self.render(
                [*user, {**silent, "content": content, "tool_calls": [call.to_dict(form)]}], generation=False
            )
            return with_call != self.render([*user, silent], generation=False)
        except TemplateFailed:
            return False

    @cached_property
    def takes_parts(self) -> bool:
        """Whether a list of text parts renders as its text; otherwise parts are joined by spaces, as SGLang does."""
        turn = [{"role": "user", "content": [{"type": "text", "text": "zqx"}]}]
        plain = [{"role": "user", "content": "zqx"}]
        try:
            return self.render(turn, generation=True) == self.render(plain, generation=True)
        except TemplateFailed:
            return False

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The dicts of a conversation in the form this template reads."""
        has_parts = any(not isinstance(message.content, str) for message in conversation.messages)
        has_calls = any(message.tool_calls for message in conversation.messages)
        has_reasoning = any(message.reasoning for message in conversation.messages)
        parts = has_parts and self.takes_parts
        form, empty = self.call_form if has_calls else ("dict", "")
        field = self.reasoning_field if has_reasoning else ""
        dicts = [m.to_dict(reasoning_field=field, arguments=form, parts=parts) for m in conversation.messages]
        has_raw = any(message.raw for message in conversation.messages)
        if has_raw and self._reasoning_field is None and not self._opens_think:
            for message, turn in zip(dicts, conversation.messages, strict=True):
                message["content"] = turn.raw or message["content"]  # as the row has it, and as a client would send it
        for message in dicts:
            if empty is None and message.get("tool_calls") and not message["content"]:
                message["content"] = None
        return dicts


def _is_stock(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    own = getattr(type(tokenizer), "apply_chat_template", None)
    return own is PreTrainedTokenizerBase.apply_chat_template


def _compiled(tokenizer: Any) -> Callable[[Mapping[str, Any]], str] | None:
    """The template compiled by transformers' own compiler, without the per-call overhead of `apply_chat_template`."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:
        return None
    template = _compile_jinja_template(tokenizer.chat_template)
    # `template.render` copies its globals, a chain of maps, twice on every call; they are the same for all of ours
    shared = {**dict(template.globals), **tokenizer.special_tokens_map}
    environment = template.environment

    def render(variables: Mapping[str, Any]) -> str:
        context = environment.context_class(environment, {**shared, **variables}, template.name, template.blocks)
        return "".join(template.root_render_func(context))

    return render


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
