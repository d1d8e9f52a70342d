"""Who owns which rows: batches as SGLang's scheduler makes them, without SGLang."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from eagle3_data.patches.sglang.rows import Claims, Prompts

OURS = "e3d-run-{}-0"


def request(name: str, tokens: int) -> Any:
    finished = SimpleNamespace(reason=None)
    return SimpleNamespace(
        rid=name,
        origin_input_ids=array("q", range(tokens)),
        to_finish=None,
        ended=finished,
        finished=lambda: finished.reason is not None,
    )


def claim(prompts: Prompts, *rows: tuple[Any, int, int]) -> Claims:
    """Rows are (request, prefix, extend)."""
    requests, prefixes, extends = zip(*rows, strict=True)
    return prompts.claim(SimpleNamespace(reqs=requests, prefix_lens=list(prefixes), extend_lens=list(extends)))


def spans(claims: Claims) -> list[tuple[str, int, int, int, int, bool]]:
    return [(s.prompt.rid, s.offset, s.start, s.rows, s.index, s.final) for s in claims.segments]


def test_rows_are_counted_over_foreign_requests_too() -> None:
    a, b = request(OURS.format("a"), 5), request(OURS.format("b"), 7)
    others = [request(name, 3) for name in ("HEALTH_CHECK_1", "../e3d-run-x-0", "e3d-run-x-0/y")]
    claims = claim(Prompts(), (others[0], 0, 3), (a, 0, 5), (others[1], 0, 3), (others[2], 0, 3), (b, 0, 7))
    assert spans(claims) == [(a.rid, 3, 0, 5, 1, True), (b.rid, 14, 0, 7, 4, True)]
    assert not claims.failures
    assert list(claims.segments[0].prompt.ids) == [0, 1, 2, 3, 4]


def test_chunks_and_generated_tokens() -> None:
    prompts, a, b = Prompts(), request(OURS.format("a"), 10), request(OURS.format("b"), 2)
    assert spans(claim(prompts, (a, 0, 4))) == [(a.rid, 0, 0, 4, 0, False)]
    assert spans(claim(prompts, (b, 0, 2), (a, 4, 4))) == [(b.rid, 0, 0, 2, 0, True), (a.rid, 2, 4, 4, 1, False)]
    # b decodes in a mixed batch: a row, but not of its prompt
    assert spans(claim(prompts, (a, 8, 2), (b, 2, 1))) == [(a.rid, 0, 8, 2, 0, True)]


def test_a_cached_prefix_is_a_failure_and_never_a_short_dump() -> None:
    prompts, a = Prompts(), request(OURS.format("a"), 10)
    claims = claim(prompts, (a, 6, 4))
    assert not claims.segments
    assert [(f.reason, f.prompt.rid) for f in claims.failures] == [("rows", a.rid)]
    assert "prefix cache" in claims.failures[0].detail


def test_a_prompt_that_starts_again_is_never_mixed() -> None:
    prompts, a = Prompts(), request(OURS.format("a"), 10)
    first = claim(prompts, (a, 0, 4)).segments[0].prompt
    again = claim(prompts, (a, 0, 6))
    assert again.abandoned == [first]
    second = again.segments[0].prompt
    assert second is not first
    assert spans(claim(prompts, (a, 6, 4))) == [(a.rid, 0, 6, 4, 0, True)]


def test_a_complete_prompt_that_is_prefilled_again_is_left_alone() -> None:
    """A retracted request is prefilled once more, with the tokens that it has generated."""
    prompts, a = Prompts(), request(OURS.format("a"), 4)
    claim(prompts, (a, 0, 4))
    again = claim(prompts, (a, 0, 6))
    assert not again.segments
    assert not again.failures


def test_aborted_requests_leave_nothing() -> None:
    """SGLang replaces a rejected prompt by one token and still runs it."""
    prompts, a, b = Prompts(), request(OURS.format("a"), 1), request(OURS.format("b"), 10)
    a.to_finish = object()
    claim(prompts, (b, 0, 4))
    b.to_finish = object()
    claims = claim(prompts, (a, 0, 1), (b, 4, 4))
    assert not claims.segments
    assert [(f.prompt.rid, f.reason) for f in claims.failures] == [(b.rid, "aborted")]


def test_ended_requests_are_forgotten() -> None:
    prompts, a = Prompts(), request(OURS.format("a"), 10)
    claim(prompts, (a, 0, 4))
    a.ended.reason = "abort"
    claim(prompts, (request("x", 1), 0, 1))
    fresh = request(a.rid, 10)
    claims = claim(prompts, (fresh, 0, 10))
    assert claims.abandoned == []
    assert spans(claims)[0][3:] == (10, 0, True)
