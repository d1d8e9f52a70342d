"""A dump's header says what its fields are, and fits the gap that was left for it."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from eagle3_data.patches.sglang.dumps import DumpForm
from eagle3_data.protocol import DumpMeta

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
