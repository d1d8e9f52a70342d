"""Tokenizers made on the fly, the chat templates of `templates/`, and what each target's assistant writes.

`written` and `headers` are the tests' own knowledge of each format, worked out by hand: nothing of the code under test
is used to find the spans that it is compared with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pre-tokenizer of Qwen and its relatives: runs of line breaks become one piece, as in the real ones."""

Turn = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """One target: its tokens, and the text that its assistant writes for a turn."""

    specials: tuple[str, ...]
    bos: str | None
    eos: str
    header: str
    """What stands before an assistant's turn in a prompt."""
    written: Callable[[Turn], str]


def calls_of(turn: Turn) -> list[Mapping[str, Any]]:
    return [call["function"] for call in turn.get("tool_calls", ())]


def arguments(call: Mapping[str, Any]) -> str:
    value = call["arguments"]
    return json.dumps(json.loads(value) if isinstance(value, str) else value)


def inline(turn: Turn) -> str:
    reasoning = turn.get("reasoning_content")
    return f"<think>\n{reasoning}\n</think>\n\n{turn['content']}" if reasoning else str(turn["content"] or "")


def llama(turn: Turn) -> str:
    for call in calls_of(turn):
        return f'{{"name": "{call["name"]}", "parameters": {arguments(call)}}}<|eot_id|>'
    return inline(turn).strip() + "<|eot_id|>"


def qwen(turn: Turn) -> str:
    reasoning = turn.get("reasoning_content")
    text = f"<think>\n{reasoning}\n</think>\n\n{turn['content']}" if reasoning else str(turn["content"] or "")
    for number, call in enumerate(calls_of(turn)):
        text += "\n" if turn["content"] or number else ""
        text += f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {arguments(call)}}}\n</tool_call>'
    return text + "<|im_end|>"


def harmony(turn: Turn) -> str:
    reasoning = turn.get("reasoning_content")
    for call in calls_of(turn):
        thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
        return f"{thought} to=functions.{call['name']}<|channel|>commentary json<|message|>{arguments(call)}<|call|>"
    thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
    return f"{thought}<|channel|>final<|message|>{turn['content']}<|return|>"


def gemma(turn: Turn) -> str:
    return inline(turn).strip() + "<end_of_turn>"


def deepseek_calls(turn: Turn) -> str:
    text = ""
    for number, call in enumerate(calls_of(turn)):
        text += "\n" if number else "<｜tool▁calls▁begin｜>"
        text += f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call['name']}\n"
        text += f"```json\n{arguments(call)}\n```<｜tool▁call▁end｜>"
        text += "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>" if number else ""
    return text


def deepseek_v3(turn: Turn) -> str:
    return deepseek_calls(turn) or inline(turn) + "<｜end▁of▁sentence｜>"


def deepseek_r1(turn: Turn) -> str:
    reasoning = turn.get("reasoning_content")
    thought = f"{reasoning}\n</think>\n\n" if reasoning else ""
    return thought + (deepseek_calls(turn) or turn["content"] + "<｜end▁of▁sentence｜>")


def deepseek_v31(turn: Turn) -> str:
    reasoning = turn.get("reasoning_content")
    text = (f"{reasoning}</think>" if reasoning else "") + str(turn["content"] or "")
    if calls_of(turn):
        calls = "".join(
            f"<｜tool▁call▁begin｜>{call['name']}<｜tool▁sep｜>{arguments(call)}<｜tool▁call▁end｜>"
            for call in calls_of(turn)
        )
        text += f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"
    return text + "<｜end▁of▁sentence｜>"


def kimi(turn: Turn) -> str:
    reasoning = turn.get("reasoning_content")
    text = (f"{reasoning}</think>" if reasoning else "") + str(turn["content"] or "")
    if turn.get("tool_calls"):
        calls = "".join(
            f"<|tool_call_begin|>{call['id']}<|tool_call_argument_begin|>{arguments(call['function'])}<|tool_call_end|>"
            for call in turn["tool_calls"]
        )
        text += f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"
    return text + "<|im_end|>"


DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
KIMI = (
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
TARGETS: Mapping[str, Target] = {
    "llama-3.1": Target(
        ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        llama,
    ),
    "qwen3": Target(("<|im_start|>", "<|im_end|>"), None, "<|im_end|>", "<|im_start|>assistant\n", qwen),
    "gpt-oss": Target(
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        None,
        "<|return|>",
        "<|start|>assistant",
        harmony,
    ),
    "gemma-3": Target(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", "<start_of_turn>model\n", gemma
    ),
    "deepseek-v3": Target(DEEPSEEK, DEEPSEEK[0], DEEPSEEK[1], "", deepseek_v3),
    "deepseek-r1": Target(DEEPSEEK, DEEPSEEK[0], DEEPSEEK[1], "", deepseek_r1),
    "deepseek-v3.1": Target(DEEPSEEK, DEEPSEEK[0], DEEPSEEK[1], "", deepseek_v31),
    "kimi-k2.5": Target(KIMI, "[BOS]", "[EOS]", "<|im_assistant|>assistant<|im_middle|>", kimi),
}

CORPUS = [
    "the quick brown fox jumps over the lazy dog\n\n",
    "The capital of France is Paris.\n\n\nassistant user system model tool function\n",
    'I think that it is 42, since 6 * 7 = 42.\n```json\n{"city": "Paris", "unit": "C"}\n```\n\n',
    "Hello! How can I help you today? Here is a list:\n- one\n- two\n\n- three\n",
    "one\n\n\ntwo\n\n\nthree\n\n\nfour\n\n\n",
]


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the target's special tokens and template; line breaks merge, as in the real ones."""
    target = TARGETS[name]
    return make_tokenizer(target.specials, target.bos, target.eos, (TEMPLATES / f"{name}.jinja").read_text())


def make_tokenizer(specials: Sequence[str], bos: str | None, eos: str, template: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS * 8, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    fast.chat_template = template
    return fast


class SlowTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python alone, as Kimi's: its own `encode` and `decode`, no offsets, no Rust backend."""

    vocab_files_names: ClassVar[dict[str, str]] = {}

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self.inner = inner
        super().__init__(bos_token=inner.bos_token, eos_token=inner.eos_token)
        self.chat_template = inner.chat_template

    @property
    def vocab_size(self) -> int:
        return len(self.inner)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.inner.get_vocab())

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        return list(self.inner.tokenize(text))

    def _convert_token_to_id(self, token: str) -> int:
        return int(self.inner.convert_tokens_to_ids(token))

    def _convert_id_to_token(self, index: int) -> str:
        return str(self.inner.convert_ids_to_tokens(index))

    @property
    def all_special_ids(self) -> list[int]:
        return [index for index, added in self.inner.added_tokens_decoder.items() if added.special]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        return self.inner.convert_ids_to_tokens(ids, skip_special_tokens=skip_special_tokens)

    def encode(self, text: str, **unused: Any) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Any, **unused: Any) -> str:
        return str(self.inner.decode(token_ids))


def marked_text(name: str, input_ids: Sequence[int], loss_mask: Sequence[int]) -> list[str]:
    """The trained text, one string per run of supervised tokens."""
    runs: list[list[int]] = []
    previous = 0
    for token, learnt in zip(input_ids, loss_mask, strict=True):
        if learnt and not previous:
            runs.append([])
        if learnt:
            runs[-1].append(int(token))
        previous = learnt
    return [tokenizer(name).decode(run) for run in runs]


def spans_by_hand(text: str, written: Sequence[str]) -> list[tuple[int, int]]:
    """Character spans of the turns in a rendered text, found from its end."""
    spans, end = [], len(text)
    for expected in reversed(written):
        start = text.rindex(expected, 0, end)
        spans.append((start, start + len(expected)))
        end = start
    return spans[::-1]
