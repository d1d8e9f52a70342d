"""The numbers of an evaluation from answers made by hand, and prompts in both forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3_data.errors import ConfigError, InputError
from eagle3_data.train.eval_prompts import EvalPrompt, heldout_prompts, read_prompts
from eagle3_data.train.evaluate import Acceptance, Answer, EvalConfig, Measured, make_report, server_config
from tests.train.fakes import random_samples


def answer(
    tokens: int, verifications: int, histogram: tuple[int, ...], category: str = "a", repeat: bool = False
) -> Answer:
    accepted = sum(k * n for k, n in enumerate(histogram))
    ids = tuple([7] * tokens if repeat else range(tokens))
    return Answer(EvalPrompt("x", category, (1, 2)), ids, verifications, accepted, histogram)


def test_acceptance_is_weighted_by_verifications() -> None:
    """10 tokens in 9 verifications and 90 in 30: 100 / 39, not the mean of 1.11 and 3."""
    found = Acceptance.of([answer(10, 9, (9, 0, 0, 0)), answer(90, 30, (5, 5, 6, 14))])
    assert found.acceptance_length == pytest.approx(100 / 39)
    assert found.accepted_per_step == pytest.approx((5 + 12 + 42) / 39)
    assert found.by_position == pytest.approx([25 / 39, 20 / 39, 14 / 39])


def test_an_answer_of_one_token_says_nothing() -> None:
    found = Acceptance.of([answer(1, 0, ()), answer(8, 4, (0, 4))])
    assert (found.answers, found.acceptance_length) == (2, 2.0)
    assert Acceptance.of([]).acceptance_length == 1.0


def test_repeating_answers_are_flagged_and_left_out_of_one_row() -> None:
    answers = [answer(40, 10, (0, 0, 0, 10), repeat=True), answer(40, 40, (40,), category="b")]
    config = EvalConfig(target="t")
    plain = Measured([answers[0], answer(39, 0, ())], 50.0)
    report = make_report(Measured(answers, 100.0), plain, config, draft="d")
    assert report.overall.low_diversity == 1
    assert report.overall.acceptance_length == pytest.approx(80 / 50)
    assert report.diverse_only.acceptance_length == 1.0
    assert report.by_category["a"].acceptance_length == 4.0
    assert (report.speedup, report.equal_answers) == (2.0, 1)
    assert json.loads(json.dumps(report.to_dict()))["speedup"] == 2.0


def test_prompts_are_rendered_with_the_chat_template(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = tmp_path / "p.jsonl"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    file.write_text(
        json.dumps({"prompt": "hello fox", "source": "s"}) + "\n\n" + json.dumps({"messages": messages}) + "\n"
    )
    prompts = read_prompts(file, str(tiny_llama), trust_remote_code=False, limit=None)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    assert tokenizer.decode(prompts[0].input_ids) == "<|user|>hello fox</s><|assistant|>"
    assert tokenizer.decode(prompts[1].input_ids) == "<|system|>be brief</s><|user|>hi</s><|assistant|>"
    assert [p.category for p in prompts] == ["s", "all"]
    file.write_text(json.dumps({"prompt": "one\u2028line\x85of text"}, ensure_ascii=False) + "\n")
    (prompt,) = read_prompts(file, str(tiny_llama), trust_remote_code=False, limit=None)
    assert "one\u2028line" in tokenizer.decode(prompt.input_ids)
    file.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(InputError, match="not UTF-8"):
        read_prompts(file, str(tiny_llama), trust_remote_code=False, limit=None)
    file.write_text('{"prompt": "x"}\nnot json\n')
    with pytest.raises(InputError, match=r"p\.jsonl:2"):
        read_prompts(file, str(tiny_llama), trust_remote_code=False, limit=None)
    file.write_text('{"prompt": "x"}\n')
    with pytest.raises(ConfigError, match="tokenizer"):
        read_prompts(file, str(tmp_path), trust_remote_code=False, limit=None)


def test_heldout_prompts_end_before_the_first_answer() -> None:
    data = random_samples([10, 20], width=8, vocab=50)
    prompts = heldout_prompts(data, [1], limit=None)
    assert prompts[0].input_ids == tuple(data.samples[1]["input_ids"][:10].tolist())


def test_server_arguments_win_last() -> None:
    config = server_config(EvalConfig(target="t", device="cpu", server_args=("--x", "1")), Path("draft"))
    assert config.draft == "draft"
    assert config.extra_args[-2:] == ("--x", "1")
    assert server_config(EvalConfig(target="t"), None).draft is None
