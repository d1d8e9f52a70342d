"""Masks on the real templates' behaviours: what is learnt is what the assistant wrote, no more and no less."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from eagle3_data.builders.samples import Sample, SampleReport, SampleSpec, SampleStore, prepare_samples

from . import conversations as talk
from .kit import TARGETS, marked_text, spans_by_hand, tokenizer

APPEND_ONLY = {"llama-3.1", "gemma-3", "deepseek-v3"}
CASES = {
    "multi_turn": talk.MULTI_TURN,
    "system": talk.SYSTEM,
    "reasoning": talk.REASONING,
    "one_call": talk.ONE_CALL,
    "parallel_calls": talk.PARALLEL_CALLS,
    "empty_turn": talk.EMPTY_TURN,
    "one_token": talk.ONE_TOKEN,
}
REFUSED = {
    ("llama-3.1", "parallel_calls"): "template",
    ("gpt-oss", "parallel_calls"): "turn not rendered",
    ("gemma-3", "parallel_calls"): "turn not rendered",
    ("gemma-3", "one_call"): "turn not rendered",
}
"""What these formats cannot say is refused with a reason, never rendered by half."""


def samples_of(
    path: Path, name: str, turns: talk.Turns, *, tokenizer_: Any = None, tools: Any = None, **spec: Any
) -> tuple[list[Sample], SampleReport]:
    out = path / "samples.arrow"
    good = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "last row"}]}
    rows = [{"id": "case", "messages": turns, "tools": tools}, good]
    report = prepare_samples(rows, tokenizer_ or tokenizer(name), SampleSpec(**spec), out)
    return [sample for sample in SampleStore.open(out) if sample.id == "case"], report


def check(name: str, samples: list[Sample], written: list[str]) -> None:
    """Every expected text is learnt once, in order; the masks equal those of spans found by hand."""
    learnt = [text for sample in samples for text in marked_text(name, sample.input_ids, sample.loss_mask)]
    assert learnt == written
    rest = list(written)
    for sample in samples:
        count = len(marked_text(name, sample.input_ids, sample.loss_mask))
        here, rest = rest[:count], rest[count:]
        text = tokenizer(name).decode(sample.input_ids)
        encoded = tokenizer(name)(text, add_special_tokens=False, return_offsets_mapping=True)
        if list(encoded["input_ids"]) != list(sample.input_ids):
            continue  # ids joined at a border have no offsets of their own; their text was compared above
        by_hand = np.zeros(len(sample.input_ids), np.uint8)
        for start, end in spans_by_hand(text, here):
            for token, (left, right) in enumerate(encoded["offset_mapping"]):
                by_hand[token] |= start <= left and right <= end
        assert sample.loss_mask.tolist() == by_hand.tolist()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TARGETS)
def test_learns_what_the_assistant_wrote(tmp_path: Path, name: str, case: str) -> None:
    tools = talk.TOOLS if "call" in case and name != "gemma-3" else None
    samples, report = samples_of(tmp_path, name, CASES[case], tools=tools)
    if (name, case) in REFUSED:
        assert not samples
        assert REFUSED[name, case] in report.dropped
        return
    turns = [turn for turn in CASES[case] if turn["role"] == "assistant"]
    spoken = [turn for turn in turns if turn["content"] or turn.get("tool_calls")]
    assert samples
    assert all(0 < sample.supervised < sample.tokens for sample in samples)
    check(name, samples, [TARGETS[name].written(turn) for turn in spoken])
    if name in APPEND_ONLY and case != "reasoning":  # a reasoning field that is not rendered leaves later prompts
        assert len(samples) == 1


@pytest.mark.parametrize("name", TARGETS)
def test_assistant_text_quoting_a_role_marker(tmp_path: Path, name: str) -> None:
    marker = TARGETS[name].header.strip() or "<｜Assistant｜>"
    turns = talk.quoting(marker)
    samples, _ = samples_of(tmp_path, name, turns)
    check(name, samples, [TARGETS[name].written(turn) for turn in turns if turn["role"] == "assistant"])


@pytest.mark.parametrize("name", ["llama-3.1", "qwen3", "gpt-oss"])
def test_c16_masks_without_generation_tags(tmp_path: Path, name: str) -> None:
    assert "generation %}" not in tokenizer(name).chat_template
    samples, _ = samples_of(tmp_path, name, talk.MULTI_TURN)
    for sample in samples:
        assert 0 < sample.supervised < sample.tokens


def test_c21_empty_think_header_of_non_thinking_mode(tmp_path: Path) -> None:
    samples, report = samples_of(tmp_path, "qwen3", talk.MULTI_TURN, thinking="off")
    assert len(samples) == 3
    for number, sample in enumerate(samples):
        served = tokenizer("qwen3").apply_chat_template(
            talk.MULTI_TURN[: 2 * number + 1], add_generation_prompt=True, enable_thinking=False
        )["input_ids"]
        first = int(np.flatnonzero(sample.loss_mask)[0])
        assert sample.input_ids[:first].tolist() == served
        assert tokenizer("qwen3").decode(served).endswith("<think>\n\n</think>\n\n")
    assert report.notes["turns thinking off"] == 4


@pytest.mark.parametrize("thinking", ["on", "template"])
def test_empty_think_block_is_never_learnt(tmp_path: Path, thinking: str) -> None:
    """In thinking mode the template writes a block that the row does not have: context, not the assistant's text."""
    turns = talk.MULTI_TURN[:2]
    (sample,), _ = samples_of(tmp_path, "qwen3", turns, thinking=thinking)
    assert "<think>\n\n</think>\n\n" in tokenizer("qwen3").decode(sample.input_ids)
    assert marked_text("qwen3", sample.input_ids, sample.loss_mask) == [turns[1]["content"] + "<|im_end|>"]


def test_the_users_own_switch_wins(tmp_path: Path) -> None:
    samples, report = samples_of(tmp_path, "qwen3", talk.MULTI_TURN, template_kwargs={"enable_thinking": False})
    assert "turns thinking off" not in report.notes
    assert "</think>" in tokenizer("qwen3").decode(samples[0].input_ids)


@pytest.mark.parametrize("name", TARGETS)
def test_text_parts_are_text(tmp_path: Path, name: str) -> None:
    """Content as OpenAI parts renders as its text; several parts as SGLang renders them."""
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "6 * 7?"}]
    samples, _ = samples_of(tmp_path, name, [{"role": "user", "content": parts}, talk.assistant("42.")])
    text = tokenizer(name).decode(samples[0].input_ids)
    assert ("What is6 * 7?" if name in ("gemma-3", "kimi-k2.5") else "What is 6 * 7?") in text


@pytest.mark.parametrize("name", TARGETS)
def test_c23_reasoning_is_rendered_and_learnt_by_default(tmp_path: Path, name: str) -> None:
    samples, _ = samples_of(tmp_path, name, talk.REASONING)
    text = "".join(marked_text(name, samples[-1].input_ids, samples[-1].loss_mask))
    assert "42 + 1 = 43" in text
    assert "43." in text


@pytest.mark.parametrize("name", TARGETS)
def test_blank_reasoning_is_no_reasoning(tmp_path: Path, name: str) -> None:
    """Most templates strip it: an answer beside it is still learnt, and a turn of nothing else says nothing."""
    blank, _ = samples_of(tmp_path, name, [talk.user("6 * 7?"), talk.assistant("42.", reasoning="\n\n")])
    assert "42." in "".join(marked_text(name, blank[0].input_ids, blank[0].loss_mask))
    turns = [talk.user("a"), talk.assistant("", reasoning="\n\n"), talk.user("6 * 7?"), talk.assistant("42.")]
    samples, report = samples_of(tmp_path, name, turns)
    assert len(samples) == 1
    assert not report.dropped


@pytest.mark.parametrize("name", TARGETS)
def test_c23_reasoning_as_context_only(tmp_path: Path, name: str) -> None:
    learnt, _ = samples_of(tmp_path, name, talk.REASONING)
    context, _ = samples_of(tmp_path, name, talk.REASONING, reasoning="context")
    assert [sample.input_ids.tolist() for sample in context] == [sample.input_ids.tolist() for sample in learnt]
    text = "".join(marked_text(name, context[-1].input_ids, context[-1].loss_mask))
    assert "42 + 1" not in text
    assert "</think>" not in text
    assert text.startswith(("43.", "It is 42."))


@pytest.mark.parametrize("name", TARGETS)
def test_c23_reasoning_dropped(tmp_path: Path, name: str) -> None:
    samples, _ = samples_of(tmp_path, name, talk.REASONING, reasoning="drop")
    for sample in samples:
        assert "42 + 1" not in tokenizer(name).decode(sample.input_ids)


@pytest.mark.parametrize("name", TARGETS)
def test_reasoning_inside_the_content(tmp_path: Path, name: str) -> None:
    """A think block in the text gives what a reasoning field gives; one sample where later prompts keep it."""
    raw = [
        {"role": turn["role"], "content": f"<think>\n{turn['reasoning_content']}\n</think>\n\n{turn['content']}"}
        if "reasoning_content" in turn
        else turn
        for turn in talk.REASONING
    ]
    samples, _ = samples_of(tmp_path, name, raw)
    check(name, samples, [TARGETS[name].written(turn) for turn in talk.REASONING if turn["role"] == "assistant"])
    assert (len(samples) == 1) == (name in APPEND_ONLY)


@pytest.mark.parametrize("name", ["llama-3.1", "gemma-3", "deepseek-v3"])
def test_c40_one_bos(tmp_path: Path, name: str) -> None:
    """The template writes BOS and the tokenizer would add another one: one stays."""
    bos, eager = TARGETS[name].bos, copy.deepcopy(tokenizer(name))
    number = eager.convert_tokens_to_ids(bos)
    eager.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, number)]
    )
    assert eager("x")["input_ids"][0] == number
    samples, _ = samples_of(tmp_path, name, talk.MULTI_TURN, tokenizer_=eager)
    for sample in samples:
        assert sample.input_ids.tolist().count(number) == 1
        assert sample.input_ids[0] == number
