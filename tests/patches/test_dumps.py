"""The gap that is left for a dump's header holds every header."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eagle3_data.patches.sglang.dumps import DumpForm

FORM = DumpForm(layers=(1, 29, 57), width=7168, dtype="bfloat16", instance="0" * 16)


@given(
    rid=st.from_regex(r"e3d-[0-9a-z]{1,12}-[0-9a-f]{4,32}-[0-9]{1,4}", fullmatch=True),
    tokens=st.integers(1, 2**31 - 1),
    next_token=st.integers(-1, 2**31 - 1),
    finite=st.booleans(),
)
def test_every_header_fits_the_gap(rid: str, tokens: int, next_token: int, finite: bool) -> None:
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
