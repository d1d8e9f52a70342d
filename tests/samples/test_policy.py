"""Limits, duplicates, and samples with nothing to learn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_data.builders.samples import SampleSpec, SampleStore, policy, prepare_samples
from eagle3_data.builders.samples.policy import Seen, limit, mask_ends
from eagle3_data.errors import ConfigError, InputError, SampleError

from . import conversations as talk
from .kit import marked_text, tokenizer

NAME = "llama-3.1"


def words(count: int) -> str:
    return " ".join(["fox"] * count)


def test_c19_nothing_left_to_learn_after_the_cut(tmp_path: Path) -> None:
    """6,000 tokens, limit 4,096, the whole answer beyond it: dropped with that reason, not counted as trained."""
    long = [talk.user(words(5000)), talk.assistant(words(400))]
    short = [talk.user("hi"), talk.assistant("hello")]
    rows = [{"id": "long", "messages": long}, {"id": "short", "messages": short}]
    spec = SampleSpec(max_tokens=4096, truncation="cut")
    report = prepare_samples(rows, tokenizer(NAME), spec, tmp_path / "s.arrow")
    assert report.dropped == {"truncated, nothing to learn": 1}
    store = SampleStore.open(tmp_path / "s.arrow")
    assert [sample.id for sample in store] == ["short"]
    assert report.tokens == int(store.tokens.sum())
    (drop,) = [json.loads(line) for line in (tmp_path / "s.dropped.jsonl").read_text().splitlines()]
    assert (drop["id"], drop["reason"]) == ("long", "truncated, nothing to learn")


def test_cut_keeps_whole_turns(tmp_path: Path) -> None:
    turns = [talk.user("hi"), talk.assistant("hello"), talk.user(words(30)), talk.assistant(words(300))]
    rows = [{"messages": turns}]
    spec = SampleSpec(max_tokens=200, truncation="cut")
    prepare_samples(rows, tokenizer(NAME), spec, tmp_path / "s.arrow")
    (sample,) = SampleStore.open(tmp_path / "s.arrow")
    assert marked_text(NAME, sample.input_ids, sample.loss_mask) == ["hello<|eot_id|>"]
    assert sample.loss_mask[-1] == 1


def test_too_long_is_dropped_by_default(tmp_path: Path) -> None:
    rows = [{"messages": [talk.user("hi"), talk.assistant(words(300))]}, {"messages": talk.MULTI_TURN}]
    report = prepare_samples(rows, tokenizer(NAME), SampleSpec(max_tokens=250), tmp_path / "s.arrow")
    assert report.dropped == {"too long": 1}


def test_exact_duplicates_are_reported_and_kept_once(tmp_path: Path) -> None:
    rows = [{"id": str(number), "messages": talk.MULTI_TURN} for number in range(4)]
    report = prepare_samples(rows, tokenizer(NAME), SampleSpec(), tmp_path / "s.arrow")
    assert (report.samples, report.dropped) == (1, {"duplicate": 3})
    report = prepare_samples(rows, tokenizer(NAME), SampleSpec(dedupe="keep-all"), tmp_path / "s.arrow")
    assert (report.samples, report.dropped) == (4, {})


@pytest.mark.parametrize("turns", [[talk.user("hi")], [talk.user("hi"), talk.assistant("")]])
def test_a_run_without_anything_to_learn_stops_and_shows_one(tmp_path: Path, turns: talk.Turns) -> None:
    with pytest.raises(SampleError, match=r"none of 1 rows.*row 0 \(id mine\): nothing to learn"):
        prepare_samples([{"id": "mine", "messages": turns}], tokenizer(NAME), SampleSpec(), tmp_path / "s.arrow")
    assert list(tmp_path.iterdir()) == []


def test_a_hopeless_run_stops_early(tmp_path: Path) -> None:
    endless = ({"messages": [talk.user("hi")]} for _ in iter(int, 1))
    with pytest.raises(SampleError, match=r"none of 512 rows"):
        prepare_samples(endless, tokenizer(NAME), SampleSpec(), tmp_path / "s.arrow")


def test_prompts_alone_are_no_samples(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="no assistant turn"):
        prepare_samples([{"prompt": "hi"}], tokenizer(NAME), SampleSpec(), tmp_path / "s.arrow")


def test_ready_ids_pass_untouched(tmp_path: Path) -> None:
    ids = [5, 900_000, 5, 7]  # not even ids of this tokenizer
    rows = [{"id": "x", "input_ids": ids, "loss_mask": [0, 0, 1, 0]}, {"input_ids": [1], "loss_mask": [0]}]
    report = prepare_samples(rows, tokenizer(NAME), SampleSpec(), tmp_path / "s.arrow")
    (sample,) = SampleStore.open(tmp_path / "s.arrow")
    assert sample.input_ids.tolist() == ids
    assert report.dropped == {"nothing to learn": 1}


def test_limit() -> None:
    cut, drop = SampleSpec(max_tokens=10, truncation="cut"), SampleSpec(max_tokens=10)
    assert limit([4, 10], 10, drop) == 10
    assert limit([4, 11], 11, drop) == "too long"
    assert limit([4, 11], 11, cut) == 4
    assert limit([11], 11, cut) == "truncated, nothing to learn"
    assert limit([], 3, cut) == "nothing to learn"


@given(st.lists(st.integers(0, 1), max_size=30))
def test_mask_ends(mask: list[int]) -> None:
    array = np.array(mask, np.uint8)
    expected = [i + 1 for i in range(len(mask)) if mask[i] and (i + 1 == len(mask) or not mask[i + 1])]
    assert mask_ends(array) == expected


def test_seen_remembers_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "RECENT", 7)
    seen, draw = Seen(), np.random.default_rng(0)
    digests = [draw.bytes(16) for _ in range(200)] + [bytes(16), bytes(15) + b"\1", b"\1" + bytes(15)]
    assert all(seen.add(digest) for digest in digests)
    assert not any(seen.add(digest) for digest in digests)


def test_spec_round_trip_and_typos() -> None:
    spec = SampleSpec(loss="last-turn", max_tokens=100, template_kwargs={"reasoning_effort": "low"})
    assert SampleSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    with pytest.raises(ConfigError, match=r"unknown field 'los'"):
        SampleSpec.from_dict({"los": "last-turn"})
    with pytest.raises(ConfigError, match=r"samples.loss 'all' is not one of"):
        SampleSpec.from_dict({"loss": "all"})


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        prepare_samples([{"messages": talk.MULTI_TURN}], tokenizer(NAME), SampleSpec(), tmp_path / "file" / "s.arrow")


def test_unfinished_or_altered_samples_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.arrow"
    with pytest.raises(InputError, match="no finished samples"):
        SampleStore.open(path)
    prepare_samples([{"messages": talk.MULTI_TURN}], tokenizer(NAME), SampleSpec(), path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["s.arrow", "s.dropped.jsonl", "s.json"]
    whole = path.read_bytes()
    path.write_bytes(whole + b"x")
    with pytest.raises(InputError, match="describes"):
        SampleStore.open(path)
    path.write_bytes(whole)
    at = whole.index(SampleStore.open(path).row(0).input_ids.tobytes())
    path.write_bytes(whole[:at] + b"\x07" + whole[at + 1 :])
    with pytest.raises(InputError, match="digest"):
        SampleStore.open(path).verify()


def test_workers_give_the_same_samples(tmp_path: Path) -> None:
    """Many rows in two processes, in one process: the same bytes, also with rows that are dropped."""
    rows = tmp_path / "in.jsonl"
    with rows.open("w") as file:
        for number in range(3000):
            turns = (
                talk.MULTI_TURN if number % 7 == 0 else [talk.user(f"say {number}"), talk.assistant(f"fox {number}")]
            )
            file.write(json.dumps({"id": f"r{number}", "messages": turns if number % 11 else turns[:1]}) + "\n")
    seen: list[tuple[int, int, int]] = []
    one = prepare_samples(rows, tokenizer("qwen3"), SampleSpec(), tmp_path / "one.arrow")
    two = prepare_samples(
        rows, tokenizer("qwen3"), SampleSpec(), tmp_path / "two.arrow", workers=2, progress=lambda *at: seen.append(at)
    )
    assert (tmp_path / "one.arrow").read_bytes() == (tmp_path / "two.arrow").read_bytes()
    assert (one.dropped, one.notes, one.rows) == (two.dropped, two.notes, two.rows)
    assert seen[-1] == (3000, two.samples, two.tokens)


def test_a_malformed_line_stops_a_run_in_processes_too(tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    good = json.dumps({"messages": [talk.user("a"), talk.assistant("b")]}) + "\n"
    rows.write_text(good * 2500 + "{oops\n" + good * 2500)
    with pytest.raises(InputError, match=r"in\.jsonl:2501: not JSON"):
        prepare_samples(rows, tokenizer(NAME), SampleSpec(), tmp_path / "s.arrow", workers=2)
    assert not (tmp_path / "s.arrow").exists()
