"""What a person sees of samples: coloured text, the audit page, the commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eagle3_data.builders.samples import SampleSpec, SampleStore, prepare_samples
from eagle3_data.builders.samples.audit import write_audit
from eagle3_data.builders.samples.encode import make_encoder
from eagle3_data.builders.samples.show import report_lines, runs

from . import conversations as talk
from .kit import TARGETS, tokenizer

NAME = "qwen3"
ROWS = [
    {"id": "<b>id</b>", "messages": talk.MULTI_TURN},
    {"id": "again", "messages": talk.MULTI_TURN},
    {"id": "tags", "messages": [talk.user("<script>alert(1)</script>"), talk.assistant("<i>no</i> & yes")]},
    {"id": "none", "messages": [talk.user("never answered")]},
]


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    prepare_samples(ROWS, tokenizer(NAME), SampleSpec(thinking="off"), tmp_path / "s.arrow")
    return SampleStore.open(tmp_path / "s.arrow")


def test_runs_cover_the_sample_and_mark_what_is_learnt(store: SampleStore) -> None:
    encoder = make_encoder(tokenizer(NAME))
    for sample in store:
        found = runs(sample, encoder)
        assert sum(run.tokens for run in found) == sample.tokens
        assert "".join(run.text for run in found) == encoder.decode(sample.input_ids.tolist())
        assert [run.text for run in found if run.learnt]
        assert not found[0].learnt


class Reader(HTMLParser):
    """Collects marked text and whatever would reach out."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.marked: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "mark":
            self.marked.append(data)
            self.tags.append("")


def test_audit_page_stands_alone(store: SampleStore, tmp_path: Path) -> None:
    write_audit(store, make_encoder(tokenizer(NAME)), tmp_path / "audit.html")
    text = (tmp_path / "audit.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert "script" not in reader.tags
    assert "i" not in reader.tags
    assert not reader.links
    assert not re.search(r"https?://|@import|url\(", text)
    assert "<i>no</i> & yes<|im_end|>" in reader.marked
    for shown in (f"{store.report.tokens:,}", "duplicate", "nothing to learn", "turns thinking off", store.digest):
        assert shown in text
    assert [line for line in report_lines(store.report) if "duplicate" in line] == ["dropped   3 duplicate"]


def model_folder(path: Path, name: str) -> Path:
    tokenizer(name).save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from eagle3_data.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=200)


def test_samples_command(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", "llama-3.1")
    rows = tmp_path / "chats.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    out, audit = tmp_path / "s.arrow", tmp_path / "a.html"
    done = run_cli(
        *("samples", str(rows), "--model", str(model), "--show", "1", "--audit", str(audit), "--out", str(out)),
        *("--thinking", "template", "--workers", "1"),
    )
    assert done.returncode == 0, done.stderr
    assert "You are welcome!" in done.stderr
    assert "dropped   1 duplicate" in done.stderr
    assert SampleStore.open(out).spec.thinking == "template"
    assert audit.exists()
    again = run_cli("samples", str(out), "--model", str(model), "--show", "1")
    assert "You are welcome!" in again.stderr


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}\n{broken\n', ":2: not JSON"),
        ("", "the file is empty"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', "none of 1 rows gives a sample"),
    ],
)
def test_bad_input_is_one_clear_message(tmp_path: Path, rows: str, message: str) -> None:
    model = model_folder(tmp_path / "model", "llama-3.1")
    path = tmp_path / "chats.jsonl"
    path.write_text(rows)
    done = run_cli("samples", str(path), "--model", str(model), "--out", str(tmp_path / "s.arrow"), "--workers", "1")
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "s.arrow").exists()


@pytest.mark.parametrize("command", ["samples", "synth"])
def test_help_has_an_example(command: str) -> None:
    done = run_cli(command, "--help")
    assert "Example: eagle3-data" in done.stdout


def test_every_target_can_be_shown(tmp_path: Path) -> None:
    for name in TARGETS:
        path = tmp_path / f"{name}.arrow"
        prepare_samples([{"messages": talk.MULTI_TURN}], tokenizer(name), SampleSpec(), path)
        write_audit(SampleStore.open(path), make_encoder(tokenizer(name)), tmp_path / f"{name}.html")
        assert (tmp_path / f"{name}.html").read_text().rstrip().endswith("</html>")
