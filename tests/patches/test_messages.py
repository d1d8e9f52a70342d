"""What two processes tell each other arrives as it was said."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_data.patches.sglang.dumps import DumpForm
from eagle3_data.patches.sglang.messages import (
    Abandon,
    Begin,
    Change,
    Close,
    Fail,
    Report,
    Rows,
    Setup,
    Spans,
    decode,
    encode,
)
from eagle3_data.protocol import SpoolConfig

numbers = st.integers(0, 2**53)
spans = st.builds(Spans, *(st.tuples(numbers, numbers) for _ in Spans._fields))
ids = st.lists(st.integers(0, 2**31 - 1)).map(lambda values: array("i", values))
changes = st.one_of(
    st.builds(Begin.of, numbers, st.text(), ids),
    st.builds(Rows, numbers, numbers, numbers, spans),
    st.builds(Fail, numbers, st.text(), st.text()),
    st.builds(Abandon, numbers),
    st.builds(Close),
)


@given(st.lists(changes))
def test_changes(said: list[Change]) -> None:
    heard = decode(encode(said))
    assert heard == said
    assert list(map(type, heard)) == list(map(type, said))


@given(ids)
def test_ids(values: array[int]) -> None:
    assert Begin.of(1, "x", values).ids_array() == values


@pytest.mark.parametrize("layers", [(1, 29, 57), ()])
def test_setup_and_report(layers: tuple[int, ...]) -> None:
    config = SpoolConfig(layers=layers or None, writers=7)
    setup = Setup(Path("/a b/\u00e9"), config, DumpForm(layers, 7168, "bfloat16", "0f"))
    assert Setup.decode(setup.encode()) == setup
    report = Report([3, 3, 1], [2], 5, 6)
    assert Report.decode(report.encode()) == report
