"""Tokenizers with surprises: their own code, padding in their file, no chat template; fast and slow agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from eagle3_data.builders.samples import SampleSpec, SampleStore, load_tokenizer, prepare_samples
from eagle3_data.builders.samples.encode import Cut, FastEncoder, SlowEncoder, make_encoder
from eagle3_data.errors import ConfigError

from . import conversations as talk
from .kit import SlowTokenizer, make_tokenizer, tokenizer

OWN_CODE = '''
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    """As Kimi's: its own way of turning text into ids, which ends up the same."""

    def encode(self, text, **kwargs):
        return super().encode(text, **kwargs)
'''


def own_code_model(path: Path) -> Path:
    tokenizer("llama-3.1").save_pretrained(path)
    (path / "own.py").write_text(OWN_CODE)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.update(tokenizer_class="OwnTokenizer", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]})
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_remote_code_runs_only_when_asked_for(tmp_path: Path) -> None:
    model = own_code_model(tmp_path / "model")
    loaded = load_tokenizer(model, trust_remote_code=True)
    assert type(loaded).__name__ == "OwnTokenizer"
    assert type(make_encoder(loaded)) is SlowEncoder
    try:
        plain = load_tokenizer(model)
    except ConfigError as error:
        assert "--trust-remote-code" in str(error)  # noqa: PT017
    else:  # transformers may fall back to a class of its own; the model's code has not run then
        assert type(plain).__name__ != "OwnTokenizer"


def test_remote_code_in_processes(tmp_path: Path) -> None:
    model, rows = own_code_model(tmp_path / "model"), tmp_path / "in.jsonl"
    with rows.open("w") as file:
        for number in range(2100):
            turns = [talk.user(f"say {number}"), talk.assistant(f"fox {number}")]
            file.write(json.dumps({"messages": turns}) + "\n")
    report = prepare_samples(rows, model, SampleSpec(), tmp_path / "a.arrow", workers=2, trust_remote_code=True)
    assert report.samples == 2100
    prepare_samples(rows, tokenizer("llama-3.1"), SampleSpec(), tmp_path / "b.arrow")
    assert SampleStore.open(tmp_path / "a.arrow").digest == SampleStore.open(tmp_path / "b.arrow").digest


def test_padding_and_truncation_of_a_tokenizer_file_are_not_used(tmp_path: Path) -> None:
    tokenizer("llama-3.1").save_pretrained(tmp_path)
    padded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    padded.backend_tokenizer.enable_padding(length=64)
    padded.backend_tokenizer.enable_truncation(8)
    encoder = make_encoder(padded)
    assert type(encoder) is FastEncoder
    text = "the quick brown fox " * 40
    assert encoder.encode(text) == tokenizer("llama-3.1")(text, add_special_tokens=False)["input_ids"]


def test_no_chat_template(tmp_path: Path) -> None:
    bare = make_tokenizer(("<|im_start|>", "<|im_end|>"), None, "<|im_end|>", "")
    with pytest.raises(ConfigError, match="no chat template"):
        prepare_samples([{"messages": talk.MULTI_TURN}], bare, SampleSpec(), tmp_path / "s.arrow")


PIECES = ["the ", "fox", "\n", "\n\n", "  ", " ", "é", "漢", "🦊", "<|im_end|>", "<|im_start|>", "1", "'s", "."]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=20), st.lists(st.integers(0, 60), min_size=2, max_size=2))
def test_fast_and_slow_encoders_agree(pieces: list[str], at: list[int]) -> None:
    text = "".join(pieces)
    low, high = sorted(min(position, len(text)) for position in at)
    fast, slow = make_encoder(tokenizer("qwen3")), SlowEncoder(SlowTokenizer(tokenizer("qwen3")))
    cuts = [Cut(low, low, high), Cut(low, low, len(text)), Cut(low, high, len(text))]
    (quick,), (sure,) = fast.encode_cuts([(text, cuts)]), slow.encode_cuts([(text, cuts)])
    assert quick.ids == sure.ids == tokenizer("qwen3")(text, add_special_tokens=False)["input_ids"]
    for one, other in zip(quick.cuts, sure.cuts, strict=True):
        assert one.clean == other.clean
        prompt = tokenizer("qwen3")(text[:low], add_special_tokens=False)["input_ids"]
        assert one.clean == (quick.ids[: len(prompt)] == prompt)
        if one.clean:
            assert one.prompt == other.prompt == len(prompt)
