"""The plan: the Kimi-K2.5 story to the digit, and refusals that name the option that would work."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3_data.builders.estimate import Room, estimate, objections, remarks, story_lengths
from eagle3_data.builders.plan import Plan, arrow_limit, check_plan
from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import BuildFailed, ConfigError
from eagle3_data.shards.layout import END_BYTES, block_sizes
from eagle3_data.status import format_bytes

KIMI = CaptureSpec(model="kimi", layers=(1, 29, 57), width=7168)
KIMI_AUX = CaptureSpec(model="kimi", layers=(1, 29, 57), width=7168, last="none")


def test_the_kimi_story() -> None:
    lengths = story_lengths(37_312, 87_800_000)
    assert (len(lengths), int(lengths.sum())) == (37_312, 87_800_000)
    whole = estimate(lengths, KIMI, shard_bytes=1 << 30, tokens_per_s=2582)
    aux = estimate(lengths, KIMI_AUX, shard_bytes=1 << 30)
    assert format_bytes(whole.nbytes) == "4.58 TiB"
    assert format_bytes(aux.nbytes) == "3.43 TiB"
    assert whole.capture_s is not None
    assert f"{whole.capture_s / 3600:.1f}" == "9.4"
    assert 57_344 <= whole.bytes_per_token < 57_360
    assert arrow_limit(KIMI) == 37_445


def test_c50_a_dry_run_names_what_does_not_fit() -> None:
    spec = CaptureSpec(model="m", layers=(1, 2, 3), width=2880)
    one = estimate(np.full(1000, 65_536, np.int32), spec, shard_bytes=1 << 30)
    assert f"{one.longest_bytes / 1e9:.2f}" == "1.51"
    assert f"{one.nbytes / 1e12:.2f}" == "1.51"
    aux = estimate(
        np.full(1000, 65_536, np.int32),
        CaptureSpec(model="m", layers=(1, 2, 3), width=2880, last="none"),
        shard_bytes=1 << 30,
    )
    (disk, mirror) = objections(one, [aux], Room(disk_bytes=1_200_000_000_000, mirror_bytes=1_000_000_000_000))
    assert "disk: 1.37 TiB needed" in disk
    assert "--last none would" in disk
    assert "nothing does" in mirror
    assert objections(aux, [one], Room(disk_bytes=1_200_000_000_000)) == []


def test_long_samples_are_remarked_or_refused() -> None:
    long = estimate(np.array([40_000], np.int32), KIMI, shard_bytes=1 << 30)
    assert "2 GiB" in remarks(long)[0]
    assert objections(long, [], Room(disk_bytes=1 << 50)) == []
    huge = estimate(np.array([150_000], np.int32), KIMI, shard_bytes=1 << 30)
    assert "8 GiB: --max-tokens 149" in objections(huge, [], Room(disk_bytes=1 << 50))[0]


def test_a_plan_deals_every_row_once_within_the_limit() -> None:
    lengths = np.random.default_rng(0).integers(1, 400, 1000).astype(np.int32)
    spec = CaptureSpec(model="m", layers=(1, 2, 3), width=64)
    plan = Plan(lengths, spec, 1 << 20)
    rows: list[int] = []
    for shard in plan:
        sizes = block_sizes(spec, lengths[shard.rows])
        assert shard.offsets.tolist() == [0, *np.cumsum(sizes)[:-1].tolist()]
        assert shard.nbytes == int(sizes.sum()) + END_BYTES
        assert shard.nbytes <= 1 << 20
        rows += shard.rows.tolist()
    assert rows == list(range(1000))
    assert plan.nbytes == sum(shard.nbytes for shard in plan)


def test_a_sample_larger_than_a_shard_gets_its_own() -> None:
    spec = CaptureSpec(model="m", layers=(1, 2, 3), width=64)
    plan = Plan(np.array([10, 5000, 10, 10], np.int32), spec, 1 << 16)
    assert [shard.rows.tolist() for shard in plan] == [[0], [1], [2, 3]]


def test_what_cannot_work_is_refused_before_any_request(tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("out")
    plan = Plan(np.array([100, 5000], np.int32), KIMI, 1 << 30)
    with pytest.raises(ConfigError, match=r"1 of 2 samples are longer than the server's 4096 tokens.*row1 with 5000"):
        check_plan(plan, out, written=0, context_length=4096, key_of=lambda row: f"row{row}")
    with pytest.raises(ConfigError, match="a tar member holds 8 GiB"):
        check_plan(
            Plan(np.array([150_000], np.int32), KIMI, 1 << 30), out, written=0, context_length=1 << 20, key_of=str
        )
    big = Plan(np.full(100_000, 30_000, np.int32), KIMI, 1 << 30)
    with pytest.raises(BuildFailed, match="free"):
        check_plan(big, out, written=0, context_length=1 << 20, key_of=str)
