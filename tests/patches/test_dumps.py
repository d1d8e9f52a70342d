"""What a dump is made of: states that its form promises, and a header that fits the gap left for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3_data.patches.sglang.capture import Capture
from eagle3_data.patches.sglang.dumps import DumpForm
from eagle3_data.patches.sglang.rows import Prompts
from eagle3_data.patches.sglang.states import BatchStates
from eagle3_data.protocol import DumpMeta, SpoolConfig

FORM = DumpForm(layers=(1, 29, 57), width=7168, dtype="bfloat16", instance="0" * 16)


@given(
    rid=st.from_regex(r"e3d-[0-9a-z]{1,12}-[0-9a-f]{4,32}-[0-9]{1,4}", fullmatch=True),
    tokens=st.integers(1, 2**31 - 1),
    next_token=st.integers(-1, 2**31 - 1),
    finite=st.booleans(),
)
def test_every_header_says_what_is_so_and_fits_the_gap(rid: str, tokens: int, next_token: int, finite: bool) -> None:
    gap = FORM.header_bytes(rid)
    header = FORM.header(
        rid,
        tokens,
        ids_digest="a" * 32,
        next_token=next_token,
        finite=finite,
        checksum=f"{'b' * 32}:{'c' * 32}",
        reserve=gap,
    )
    assert len(header) == gap
    assert gap % 64 == 0
    found = json.loads(header[8:])
    assert DumpMeta.from_strings(found["__metadata__"]) == DumpMeta(
        rid=rid,
        tokens=tokens,
        ids_digest="a" * 32,
        layers=FORM.layers,
        width=FORM.width,
        dtype=FORM.dtype,
        norm="post",
        next_token=next_token,
        finite=finite,
        checksum=f"{'b' * 32}:{'c' * 32}",
        instance=FORM.instance,
    )
    assert found["aux_hidden_states"]["shape"] == [tokens, 3 * 7168]


@pytest.mark.parametrize(
    ("rows", "requests", "wrong"),
    [(6, 2, None), (7, 2, "rows"), (6, 3, "logits of 2 requests")],
)
def test_states_that_do_not_fit_the_batch_are_no_dump(rows: int, requests: int, wrong: str | None) -> None:
    states = BatchStates(torch.zeros(6, 48).bfloat16(), torch.zeros(6, 16).bfloat16(), torch.zeros(2, 100))
    path = SimpleNamespace(states=lambda _result: states)
    form = DumpForm(layers=(1, 2, 3), width=16, dtype="bfloat16", instance="0" * 16)
    capture = Capture(cast(Any, None), path, Path(), SpoolConfig(), form, True, Prompts(), None, None)  # type: ignore[arg-type]
    if wrong is None:
        assert capture._states(None, rows, requests) is states
    else:
        with pytest.raises(ValueError, match=wrong):
            capture._states(None, rows, requests)
