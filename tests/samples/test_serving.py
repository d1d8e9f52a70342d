"""The ids before every learnt answer are the ids that a server is sent for it, with fast and slow tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3_data.builders.samples import SampleSpec, SampleStore, prepare_samples
from eagle3_data.errors import SampleError

from . import conversations as talk
from .kit import TARGETS, SlowTokenizer, make_tokenizer, marked_text, tokenizer
from .test_templates import CASES, REFUSED, samples_of

SWITCH = {"qwen3": "enable_thinking", "deepseek-v3.1": "thinking", "kimi-k2.5": "thinking"}
TEXT_ARGUMENTS = {"deepseek-v3", "deepseek-r1"}


def served_prompt(name: str, turns: talk.Turns, at: int, tools: object) -> list[int]:
    """What the target's own template and tokenizer make of the messages before turn `at`."""
    history = [dict(turn) for turn in turns[:at]]
    for turn in history:
        if "tool_calls" in turn and name in TEXT_ARGUMENTS:
            turn["content"] = None
        if turn.get("reasoning_content") and name == "gpt-oss":
            turn["thinking"] = turn.pop("reasoning_content")
        if "tool_calls" in turn:
            turn["tool_calls"] = [
                dict(call, function=_arguments(name, call["function"])) for call in turn["tool_calls"]
            ]
    kwargs = {SWITCH[name]: bool(turns[at].get("reasoning_content"))} if name in SWITCH else {}
    rendered = tokenizer(name).apply_chat_template(history, tools=tools, add_generation_prompt=True, **kwargs)
    return list(rendered["input_ids"])


def _arguments(name: str, function: dict[str, object]) -> dict[str, object]:
    value = function["arguments"]
    parsed = json.loads(value) if isinstance(value, str) else value
    return {**function, "arguments": json.dumps(parsed) if name in TEXT_ARGUMENTS else parsed}


@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("case", [*CASES, "leading_breaks"])
@pytest.mark.parametrize("name", TARGETS)
def test_prompts_are_the_served_ones(tmp_path: Path, name: str, case: str, slow: bool) -> None:
    if (name, case) in REFUSED:
        pytest.skip("this format cannot say it; test_templates checks the refusal")
    turns = CASES.get(case, talk.LEADING_BREAKS)
    tools = talk.TOOLS if "call" in case and name != "gemma-3" else None
    used = SlowTokenizer(tokenizer(name)) if slow else tokenizer(name)
    samples, _ = samples_of(tmp_path, name, turns, tokenizer_=used, tools=tools, tool_schemas="given")
    spoken = [
        at
        for at, turn in enumerate(turns)
        if turn["role"] == "assistant" and (turn["content"] or turn.get("tool_calls"))
    ]
    starts = [
        (sample, start)
        for sample in samples
        for start in range(1, sample.tokens)
        if sample.loss_mask[start] and not sample.loss_mask[start - 1]
    ]
    assert len(starts) == len(spoken)
    for at, (sample, start) in zip(spoken, starts, strict=True):
        served = served_prompt(name, turns, at, tools)
        # an empty think block that only R1's prompt opens is closed before the answer, and not learnt
        assert sample.input_ids[: len(served)].tolist() == served
        between = tokenizer(name).decode(sample.input_ids[len(served) : start])
        assert between in ("", "\n</think>\n\n")
        assert not sample.loss_mask[len(served) : start].any()


def test_a_token_across_the_border_is_never_made(tmp_path: Path) -> None:
    """`assistant\\n` + `\\n\\nThe fox`: encoded as one text the breaks merge; a server never sees that token."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chatml = make_tokenizer(("<|im_start|>", "<|im_end|>"), None, "<|im_end|>", template)
    merged = chatml("\n\n\n", add_special_tokens=False)["input_ids"]
    assert len(merged) == 1
    samples, report = samples_of(tmp_path, "qwen3", talk.LEADING_BREAKS, tokenizer_=chatml)
    assert report.notes["split at a token border"] == 1
    assert report.notes["joined at the prompt's end"] == 2
    assert [marked_text("qwen3", s.input_ids, s.loss_mask) for s in samples] == [
        ["\n\nThe fox\n<|im_end|>"],
        ["\nThe dog<|im_end|>"],
    ]
    first = chatml.apply_chat_template(talk.LEADING_BREAKS[:1], add_generation_prompt=True)["input_ids"]
    assert samples[0].input_ids[: len(first)].tolist() == first
    assert merged[0] not in samples[0].input_ids.tolist()
    # the second prompt is what a server makes of the history, where the breaks do merge
    second = chatml.apply_chat_template(talk.LEADING_BREAKS[:3], add_generation_prompt=True)["input_ids"]
    assert samples[1].input_ids[: len(second)].tolist() == second
    assert merged[0] in second


def test_unstable_template_is_refused_with_the_text(tmp_path: Path) -> None:
    template = (
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    )
    unstable = make_tokenizer(("<|im_start|>", "<|im_end|>"), None, "<|im_end|>", template)
    rows = [{"messages": talk.MULTI_TURN}]
    with pytest.raises(SampleError, match=r"unstable template.*part at character 0.*'1<\|im_start"):
        prepare_samples(rows, unstable, SampleSpec(), tmp_path / "s.arrow")
    assert list(tmp_path.iterdir()) == []


def test_only_the_last_turn(tmp_path: Path) -> None:
    for name in TARGETS:
        samples, _ = samples_of(tmp_path, name, talk.MULTI_TURN, loss="last-turn")
        assert len(samples) == 1
        (text,) = marked_text(name, samples[0].input_ids, samples[0].loss_mask)
        assert text == TARGETS[name].written(talk.MULTI_TURN[-1])


def test_what_follows_the_last_answer_is_cut(tmp_path: Path) -> None:
    turns = [*talk.MULTI_TURN, talk.user("a question that was never answered")]
    for name in TARGETS:
        samples, _ = samples_of(tmp_path, name, turns)
        assert samples[-1].loss_mask[-1] == 1


def test_tool_loop_after_one_question_stays_one_sample(tmp_path: Path) -> None:
    """Qwen3 keeps reasoning after the last question: the calls of one loop extend each other and share a sample."""
    turns = [
        talk.user("Weather in Paris?"),
        talk.assistant("", reasoning="I call.", calls=[talk.call(0, "weather", {"city": "Paris"})]),
        talk.reply(0, "weather", "12 C"),
        talk.assistant("12 C.", reasoning="Got it."),
    ]
    samples, report = samples_of(tmp_path, "qwen3", turns)
    assert [sample.key for sample in samples] == ["00000000"]
    assert report.notes["turns thinking on"] == 2
    assert len(marked_text("qwen3", samples[0].input_ids, samples[0].loss_mask)) == 2


def test_store_rows_are_the_samples(tmp_path: Path) -> None:
    samples_of(tmp_path, "qwen3", talk.MULTI_TURN)
    store = SampleStore.open(tmp_path / "samples.arrow")
    assert [sample.key for sample in store] == ["00000000_t0", "00000000_t1", "00000000_t2", "00000001"]
    assert store.row(-1).key == "00000001"
    assert store.tokens.tolist() == [sample.tokens for sample in store]
    store.verify()
