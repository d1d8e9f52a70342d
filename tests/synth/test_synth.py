"""Answers by a real server: ids as served, every row settled once, a run that was broken off goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from eagle3_data.builders.samples import SampleSpec, SampleStore, prepare_samples
from eagle3_data.builders.synth import SynthSpec, greedy_share, synthesise
from eagle3_data.errors import ConnectionLost, ManifestMismatch
from tests.samples import conversations as talk

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]  # the first test waits for the server

PROMPTS = [{"id": f"p{i}", "prompt": f"the quick brown fox {i}"} for i in range(12)]
SPEC = SynthSpec(max_new_tokens=8, thinking="off")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_ids_are_the_served_ones(server: str, tiny_model: Path, tmp_path: Path) -> None:
    report = synthesise(PROMPTS, tiny_model, SPEC, [server], tmp_path / "a.jsonl")
    assert (report.saved, report.planned, report.skipped, sum(report.failed.values())) == (12, 12, 0, 0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    for row in lines(tmp_path / "a.jsonl"):
        prompt = PROMPTS[row["row"]]
        messages = [{"role": "user", "content": prompt["prompt"]}]
        served = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)["input_ids"]
        assert row["input_ids"][: len(served)] == served
        assert row["id"] == prompt["id"]
        assert row["loss_mask"] == [0] * len(served) + [1] * row["output_tokens"]
        assert row["sampling"]["temperature"] == 0.0
        assert row["finish_reason"] in ("length", "stop")


def test_samples_take_the_ids_as_they_are(server: str, tiny_model: Path, tmp_path: Path) -> None:
    synthesise(PROMPTS, tiny_model, SPEC, [server], tmp_path / "a.jsonl")
    report = prepare_samples(tmp_path / "a.jsonl", tiny_model, SampleSpec(), tmp_path / "s.arrow")
    assert report.form == "token ids"
    stored = {
        tuple(sample.input_ids.tolist()): sample.loss_mask.tolist() for sample in SampleStore.open(tmp_path / "s.arrow")
    }
    assert stored == {tuple(row["input_ids"]): row["loss_mask"] for row in lines(tmp_path / "a.jsonl")}


def test_greedy_answers_are_the_targets_own_choice(server: str, tiny_model: Path, tmp_path: Path) -> None:
    synthesise(PROMPTS, tiny_model, SPEC, [server], tmp_path / "a.jsonl")
    prepare_samples(tmp_path / "a.jsonl", tiny_model, SampleSpec(), tmp_path / "s.arrow")
    own = greedy_share(SampleStore.open(tmp_path / "s.arrow"), [server])
    assert own.positions == sum(row["output_tokens"] for row in lines(tmp_path / "a.jsonl"))
    assert own.share > 0.99
    human = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the lazy dog jumps"}]}]
    prepare_samples(human, tiny_model, SampleSpec(), tmp_path / "h.arrow")
    assert greedy_share(SampleStore.open(tmp_path / "h.arrow"), [server]).share < 0.5


def test_resume_asks_only_for_what_is_missing(server: str, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    synthesise(PROMPTS[:5], tiny_model, SPEC, [server], out)
    with out.open("ab") as file:
        file.write(b'{"row": 5, "rows": 1, "inp')  # a line that a crash tore
    before = out.read_bytes().rpartition(b"\n")[0]
    report = synthesise(PROMPTS, tiny_model, SPEC, [server], out)
    assert (report.saved, report.skipped) == (7, 5)
    assert out.read_bytes().startswith(before)
    assert sorted(row["row"] for row in lines(out)) == list(range(12))
    with pytest.raises(ManifestMismatch, match=r"max_new_tokens 8, asked for is 9"):
        synthesise(PROMPTS, tiny_model, SynthSpec(max_new_tokens=9, thinking="off"), [server], out)


def test_failed_rows_are_in_the_ledger_and_asked_again(server: str, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    rows = [*PROMPTS[:3], {"id": "long", "prompt": "fox " * 6000}, {"id": "empty", "prompt": [{"role": "root"}]}]
    report = synthesise(rows, tiny_model, SPEC, [server], out)
    assert report.saved == 3
    assert dict(report.failed) == {"rejected": 1, "invalid row": 1}
    failures = lines(out.with_suffix(".errors.jsonl"))
    assert {failure["row"] for failure in failures} == {3, 4}
    again = synthesise(rows, tiny_model, SPEC, [server], out)
    assert (again.skipped, sum(again.failed.values())) == (3, 2)


def test_truncated_answers_by_policy(server: str, tiny_model: Path, tmp_path: Path) -> None:
    spec = SynthSpec(max_new_tokens=2, thinking="off", truncated="drop")
    report = synthesise(PROMPTS, tiny_model, spec, [server], tmp_path / "a.jsonl")
    assert report.saved + report.failed["truncated"] == 12
    assert report.failed["truncated"] > 0
    assert all(row["finish_reason"] == "stop" for row in lines(tmp_path / "a.jsonl"))


def test_conversations_are_answered_anew_turn_by_turn(server: str, tiny_model: Path, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "an old answer"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "another old answer"},
    ]
    out = tmp_path / "a.jsonl"
    synthesise(
        [{"id": "c", "messages": turns}], tiny_model, SynthSpec(max_new_tokens=400, thinking="off"), [server], out
    )
    rows = lines(out)
    assert all("old answer" not in json.dumps(row["messages"]) for row in rows)
    assert [row["turn"] for row in rows] in ([0], [0, 1], [1])
    assert sum(row["output_tokens"] for row in rows) > 0
    if rows[-1]["turn"] == 1:  # the second prompt was made from the first new answer
        assert rows[-1]["messages"][1]["content"] == rows[0]["messages"][1]["content"]


def test_calls_of_a_conversation_stay(server: str, tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"messages": talk.ONE_CALL, "tools": talk.TOOLS}]
    synthesise(rows, tiny_model, SPEC, [server], tmp_path / "a.jsonl")
    (row,) = lines(tmp_path / "a.jsonl")
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert row["messages"][3]["content"] != talk.ONE_CALL[3]["content"]


def test_command(server: str, tmp_path: Path) -> None:
    """The model is what the server says; a second run skips; the greedy share of the answers is whole."""
    prompts, out = tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    asked = ["synth", "--prompts", str(prompts), "--server", server, "--out", str(out), "--max-new-tokens", "8"]
    code = "from eagle3_data.cli import main; main()"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=200)

    first, second = run(*asked), run(*asked)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "12 answered before" in second.stderr
    greedy = run("synth", "--greedy-share", "--prompts", str(out), "--server", server)
    assert "greedy share 100.0%" in greedy.stderr, greedy.stderr
    other = run(*asked[:-1], "9")
    assert other.returncode == 1
    assert "was begun with max_new_tokens 8" in other.stderr


def test_no_server(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match="no connection"):
        synthesise(PROMPTS, tiny_model, SPEC, ["http://127.0.0.1:9"], tmp_path / "a.jsonl")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_any_end_keeps_what_is_finished(server: str, tiny_model: Path, tmp_path: Path, number: int) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"fox {i}"}) + "\n" for i in range(400)))
    code = (
        "from eagle3_data.builders.synth import *\n"
        f"r = synthesise({str(prompts)!r}, {str(tiny_model)!r}, SynthSpec(max_new_tokens=24, thinking='off'),"
        f" [{server!r}], {str(out)!r}, in_flight=4)\n"
        "print('interrupted', r.interrupted)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while (not out.exists() or out.stat().st_size < 2000) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, number)
    shown, _ = process.communicate(timeout=60)
    assert ("interrupted True" in shown) == (number != signal.SIGKILL)
    whole = out.read_bytes().rpartition(b"\n")[0].count(b"\n") + 1
    assert 0 < whole < 400
    report = synthesise(
        prompts, tiny_model, SynthSpec(max_new_tokens=24, thinking="off"), [server], out, limit=whole + 8
    )
    assert report.skipped >= 1
    assert report.skipped + report.saved == report.planned
    rows = [row["row"] for row in lines(out)]
    assert len(rows) == len(set(rows))
