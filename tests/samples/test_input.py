"""Files of every kind and form to rows; what cannot be read names its place."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3_data.builders.samples import SampleSpec, prepare_samples
from eagle3_data.builders.samples.input import BadRow, Row, open_rows, parse_row
from eagle3_data.builders.samples.messages import Conversation, ServedRow, parse_message, split_think
from eagle3_data.errors import ConfigError, InputError, SampleError
from eagle3_data.shards.layout import JSON_BYTES, MAX_ID_BYTES, SampleRecord

from .kit import tokenizer

OPENAI = {"id": "a", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
SHAREGPT = {
    "id": "a",
    "system": "be brief",
    "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
}


def rows_of(source: Any) -> tuple[str, list[Row]]:
    stream = open_rows(source)
    return stream.form.name, [parse_row(raw, stream.form) for raw in stream]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "lines.json", "parquet", "saved", "folder", "memory"])
def test_every_kind_of_input_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    rows = [{**OPENAI, "id": str(number)} for number in range(3)]
    source: Any = tmp_path / f"in.{kind}"
    if kind == "jsonl" or kind == "lines.json":
        write(source, rows)
    elif kind == "jsonl.gz":
        source.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif kind == "json":
        source.write_text(json.dumps(rows, indent=2))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), source)
    elif kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(source))
    elif kind == "folder":
        source.mkdir()
        write(source / "a.jsonl", rows[:1])
        write(source / "b.jsonl", rows[1:])
    else:
        source = rows
    form, found = rows_of(source)
    assert form == "OpenAI messages"
    assert [row.id for row in found] == ["0", "1", "2"]
    assert [row.row for row in found] == [0, 1, 2]
    assert all(isinstance(row, Conversation) and row.messages[1].content == "hello" for row in found)


def test_forms_are_told_apart(tmp_path: Path) -> None:
    ids = {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "messages": OPENAI["messages"]}
    for row, name in (
        (OPENAI, "OpenAI messages"),
        ({"conversations": OPENAI["messages"]}, "OpenAI messages (in `conversations`)"),
        (SHAREGPT, "ShareGPT"),
        ({"prompt": "hi"}, "prompts"),
        ({"prompt": OPENAI["messages"]}, "prompts"),
        (ids, "token ids"),
    ):
        assert rows_of([row])[0] == name
    (served,) = rows_of([ids])[1]
    assert served == ServedRow(0, "0", (1, 2, 3), (0, 0, 1))
    (sharegpt,) = rows_of([SHAREGPT])[1]
    assert isinstance(sharegpt, Conversation)
    assert [message.role for message in sharegpt.messages] == ["system", "user", "assistant"]


def test_sharegpt_function_calls() -> None:
    turns = [
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'},
        {"from": "observation", "value": "12 C"},
        {"from": "gpt", "value": "12 C."},
    ]
    (row,) = rows_of([{"conversations": turns}])[1]
    assert isinstance(row, Conversation)
    assert row.messages[1].tool_calls[0].arguments == {"city": "Paris"}
    assert row.messages[2].role == "tool"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [oops\n', r"in\.jsonl:2: not JSON.*\[oops"),
        ("[1, 2]\n", r"in\.jsonl:1: found list, expected a JSON object"),
        ('{"text": "a"}\n', r"in\.jsonl:1: no column of a known form; found text"),
        ('{"prompt": "a"}\n{"messages": []}\n', r"in\.jsonl:2: the form 'OpenAI messages'.*first rows are 'prompts'"),
        ("", r"in\.jsonl: the file is empty"),
        ("\n\n", r"no rows in"),
    ],
)
def test_unreadable_input_names_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        rows_of(path)


@pytest.mark.parametrize("text", ["[]", '[{"prompt": "a"}, {"prompt": ', '[{"prompt": "a"}, 3]'])
def test_broken_arrays(tmp_path: Path, text: str) -> None:
    (tmp_path / "in.json").write_text(text)
    with pytest.raises(InputError, match=r"no rows|element 1"):
        rows_of(tmp_path / "in.json")


def test_missing_and_unknown_inputs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        rows_of(tmp_path / "none.jsonl")
    (tmp_path / "in.csv").write_text("a,b\n")
    with pytest.raises(InputError, match="unknown kind of file"):
        rows_of(tmp_path / "in.csv")
    (tmp_path / "in.parquet").write_text("no parquet")
    with pytest.raises(InputError, match="not a Parquet file"):
        rows_of(tmp_path / "in.parquet")
    with pytest.raises((ConfigError, InputError), match="no-such-dataset"):
        rows_of("no-such-dataset")


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"role": "wizard", "content": "a"}, "role 'wizard'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "'image_url'; only text"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "not JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "not an object"),
    ],
)
def test_content_that_cannot_become_a_sample_is_a_reason_not_a_stop(turn: dict[str, Any], message: str) -> None:
    stream = open_rows([{"messages": [{"role": "user", "content": "a"}, turn]}])
    (raw,) = stream
    with pytest.raises(SampleError, match=message):
        parse_row(raw, stream.form)


def test_arguments_as_object_or_as_text_are_the_same() -> None:
    turns = [
        parse_message({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})
        for arguments in ({"a": 1}, '{"a": 1}')
    ]
    assert turns[0] == turns[1]


def test_think_blocks_in_text() -> None:
    assert split_think("<think>\nso\n</think>\n\nyes") == ("so", "yes")
    assert split_think("yes </think>") == ("", "yes </think>")
    assert split_think("<think>never closed") == ("", "<think>never closed")
    message = parse_message({"role": "assistant", "content": "<think>so</think>yes"})
    assert (message.reasoning, message.content, message.inline) == ("so", "yes", "<think>so</think>yes")


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_reading_takes_flat_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"in.{kind}"
    row = json.dumps({"prompt": "x" * 1000})
    count = 20_000
    path.write_text("\n".join([row] * count) if kind == "jsonl" else f"[{','.join([row] * count)}]")
    tracemalloc.start()
    assert sum(1 for _ in open_rows(path)) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20 < path.stat().st_size


HALF = "cut in an emoji \ud83d"
CALL = {"function": {"name": "f", "arguments": json.dumps({"k": HALF})}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {HALF: {"type": "string"}}}}}


@pytest.mark.parametrize("kind", ["jsonl", "json", "memory"])
@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"id": HALF}, "the id"),
        ({"source": HALF}, "the source"),
        ({"messages": [{"role": "user", "content": HALF}, OPENAI["messages"][1]]}, "message 0"),
        ({"messages": [OPENAI["messages"][0], {"role": "assistant", "content": "a", "reasoning": HALF}]}, "message 1"),
        (
            {"messages": [OPENAI["messages"][0], {"role": "assistant", "tool_calls": [CALL]}]},
            "a tool call of message 1",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}, OPENAI["messages"][1]]},
            "message 0",
        ),
        ({"tools": [TOOL]}, "the tools"),
        ({"tools": json.dumps([TOOL])}, "the tools"),
    ],
)
def test_half_an_emoji_leaves_its_row_out_and_no_other(
    tmp_path: Path, kind: str, changed: dict[str, Any], where: str
) -> None:
    rows: list[dict[str, Any]] = [
        {**OPENAI, "id": f"r{number}", "messages": [{"role": "user", "content": str(number)}, OPENAI["messages"][1]]}
        for number in range(4)
    ]
    rows[2] |= changed
    source: Any = tmp_path / f"in.{kind}"
    if kind == "jsonl":
        write(source, rows)
    elif kind == "json":
        source.write_text(json.dumps(rows))
    else:
        source = rows
    report = prepare_samples(source, tokenizer("llama-3.1"), SampleSpec(), tmp_path / "s.arrow")
    assert (report.samples, report.dropped) == (3, {"invalid row": 1})
    (drop,) = [json.loads(line) for line in (tmp_path / "s.dropped.jsonl").read_text().splitlines()]
    assert drop["row"] == 2
    assert f"half a surrogate pair at character 16 of {where}" in drop["detail"]


def test_half_an_emoji_in_the_id_of_a_row_with_ids(tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "input_ids": [n, 2, 3], "loss_mask": [0, 1, 1]} for n in range(3)]
    rows[1]["id"] = HALF
    report = prepare_samples(
        write(tmp_path / "in.jsonl", rows), tokenizer("llama-3.1"), SampleSpec(), tmp_path / "s.arrow"
    )
    assert (report.samples, report.dropped) == (2, {"invalid row": 1})


@pytest.mark.parametrize("kind", ["parquet", "saved"])
@pytest.mark.parametrize("bad", [0, 5])
def test_a_text_that_is_not_utf_8_leaves_its_row_out(tmp_path: Path, kind: str, bad: int) -> None:
    """Arrow does not check texts: half an emoji can lie in them as bytes."""
    texts = [f"prompt {number}".encode() for number in range(12)]
    texts[bad] = b"cut \xed\xa0\xbd"
    ends = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    column = pa.Array.from_buffers(pa.string(), 12, [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))])
    table, source = pa.table({"prompt": column}), tmp_path / f"in.{kind}"
    if kind == "parquet":
        pq.write_table(table, source)
    else:
        datasets.Dataset(table).save_to_disk(str(source))
    stream, found, refused = open_rows(source), [], []
    for raw in stream:
        try:
            found.append(parse_row(raw, stream.form).row)
        except BadRow as error:
            refused.append((raw.row, error.message))
    assert found == [number for number in range(12) if number != bad]
    assert refused == [(bad, f"{source}: row {bad}: not UTF-8 text (invalid continuation byte)")]


@pytest.mark.parametrize("character", ["x", "对", "\U0001f600", "\n"])
def test_an_id_that_a_record_has_no_room_for_is_dropped_before_any_capture(tmp_path: Path, character: str) -> None:
    fits = character * (MAX_ID_BYTES // len(json.dumps(character)[1:-1]))
    rows = [{"id": i, "input_ids": [n, 2], "loss_mask": [0, 1]} for n, i in enumerate(("a", fits + character, fits))]
    source = write(tmp_path / "in.jsonl", rows)
    report = prepare_samples(source, tokenizer("llama-3.1"), SampleSpec(), tmp_path / "s.arrow")
    assert (report.samples, report.dropped) == (2, {"id too long": 1})
    (drop,) = [json.loads(line) for line in (tmp_path / "s.dropped.jsonl").read_text().splitlines()]
    assert (drop["row"], f"{MAX_ID_BYTES} fit" in drop["detail"]) == (1, True)
    most = 2**31 - 1
    record = SampleRecord(
        key="1" * 24,
        id=fits,
        tokens=most,
        supervised=most,
        ids_digest="0" * 32,
        next_token=most,
        checksum=f"{'0' * 32}:{'0' * 32}",
        stored="0" * 32,
    )
    assert len(record.to_json()) == JSON_BYTES
