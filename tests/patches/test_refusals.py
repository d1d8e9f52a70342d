"""Configurations that are refused, and layers that do not read back; without starting SGLang."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3_data.patches.sglang.layers import read_layers, set_layers
from eagle3_data.patches.sglang.refusals import (
    Refused,
    argument_refusals,
    hook_refusals,
    native_refusals,
    node_refusals,
    parse_version,
    spool_refusals,
    writes_here,
)
from eagle3_data.protocol import SPOOL_ENV, SpoolConfig

GOOD = {"disable_radix_cache": True, "pp_size": 1, "nnodes": 1, "dp_size": 1}


def test_a_good_configuration_passes() -> None:
    assert argument_refusals(GOOD) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"disable_radix_cache": False}, "--disable-radix-cache"),
        ({"allow_auto_truncate": True}, "--allow-auto-truncate"),
        ({"pp_size": 2}, "pipeline"),
        ({"attn_cp_size": 2}, "context parallel"),
        ({"dcp_size": 4}, "context parallel"),
        ({"enable_prefill_cp": True}, "context parallel"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_layernorm_sp": True}, "--enable-layernorm-sp"),
        ({"speculative_draft_model_path": "/drafts/a"}, "/drafts/a"),
    ],
)
def test_each_bad_argument_is_named_with_its_way_out(change: dict[str, Any], words: str) -> None:
    (problem,) = argument_refusals({**GOOD, **change})
    assert words in problem
    assert ";" in problem or ":" in problem


def test_native_capture_needs_its_flags() -> None:
    assert native_refusals({"enable_return_aux_hidden_states": True, "aux_hidden_state_capture": "eagle3"}) == []
    assert "--enable-return-aux-hidden-states" in native_refusals({})[0]
    wrong = {"enable_return_aux_hidden_states": True, "aux_hidden_state_capture": "dflash"}
    assert "EAGLE3" in native_refusals(wrong)[0]


def test_hooks_need_prefill_graphs_off() -> None:
    def graphs(backend: str) -> dict[str, Any]:
        return {"device": "cuda", "cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend=backend))}

    assert hook_refusals(graphs("Backend.DISABLED")) == []
    assert hook_refusals({"device": "cpu"}) == []
    assert hook_refusals({"device": "cuda", "disable_cuda_graph": True}) == []
    assert hook_refusals({"device": "cuda", "cuda_graph_config": {"prefill": {"backend": "disabled"}}}) == []
    assert "--disable-cuda-graph" in hook_refusals(graphs("tc_piecewise"))[0]
    assert "--disable-cuda-graph" in hook_refusals({"device": "cuda"})[0]


def test_a_prefill_graph_that_wins_over_the_flag_is_refused() -> None:
    """`--disable-cuda-graph --cuda-graph-config '{"prefill": {"backend": "breakable"}}'` runs graphs (0.5.17)."""
    for prefill in (SimpleNamespace(backend="breakable"), {"backend": "breakable"}):
        config = SimpleNamespace(prefill=prefill)
        assert hook_refusals({"device": "cuda", "disable_cuda_graph": True, "cuda_graph_config": config})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tp_size": 2}, ["pass --enforce-disable-flashinfer-allreduce-fusion"]),
        ({"tp_size": 1}, []),
        ({"tp_size": 2, "enable_dp_attention": True}, []),  # SGLang never fuses there
        ({"tp_size": 2, "flashinfer_allreduce_fusion_backend": None}, []),
        (
            {"tp_size": 2, "flashinfer_allreduce_fusion_backend": None, "enable_aiter_allreduce_fusion": True},
            ["leave out --enable-aiter-allreduce-fusion"],
        ),
    ],
)
def test_hooks_need_the_ranks_sums_where_they_belong(change: dict[str, Any], words: list[str]) -> None:
    """Of 0.5.17's gpt-oss on two Hopper GPUs rank 0 would capture its own share of every sum."""
    args = {"device": "cuda", "disable_cuda_graph": True, "flashinfer_allreduce_fusion_backend": "auto", **change}
    assert [problem.rpartition("; ")[2] for problem in hook_refusals(args)] == words


def test_ranks_on_several_nodes_need_a_spool_that_they_share() -> None:
    config = SpoolConfig()
    assert node_refusals({"nnodes": 2, "dp_size": 1}, config) == []  # one rank writes, on the first node
    assert "shared_spool" in node_refusals({"nnodes": 2, "dp_size": 4}, config)[0]
    assert node_refusals({"nnodes": 2, "dp_size": 4}, SpoolConfig(shared_spool=True)) == []
    assert writes_here({"node_rank": 0})
    assert not writes_here({"nnodes": 2, "node_rank": 1})
    assert writes_here({"nnodes": 2, "node_rank": 1, "dp_size": 4})
    resolved = {"nnodes": 2, "node_rank": 1, "dp_size": 1, "attn_dp_size": 4}  # of --dp-size 4 --enable-dp-attention
    assert writes_here(resolved)
    assert "4 data-parallel ranks on 2 nodes" in node_refusals(resolved, config)[0]


def test_the_spool_must_be_writable_and_roomy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spool_refusals(tmp_path, SpoolConfig(high_water_bytes=1 << 20)) == []
    assert SPOOL_ENV in spool_refusals(tmp_path / "missing", SpoolConfig())[0]
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=1 << 20))
    assert "high_water_bytes" in spool_refusals(tmp_path, SpoolConfig(high_water_bytes=2 << 20))[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", ["0.5.13", "0.4.9.post2", "0.6.0", "main", ""])
def test_unknown_versions_end_the_server(version: str) -> None:
    with pytest.raises(SystemExit, match="is not supported"):
        parse_version(version)


def test_known_versions() -> None:
    assert parse_version("0.5.14.post1") == (0, 5, 14)
    assert parse_version("0.5.24.dev3+gabc") == (0, 5, 24)


class Adds:
    """Llama: every id gets 1 added."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(layers_to_capture=[])

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.model.layers_to_capture = [i + 1 for i in ids]


class AddsWhenFirstIsOne(Adds):
    """DeepSeek and Kimi."""

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.model.layers_to_capture = [i + 1 for i in ids] if ids[0] == 1 else list(ids)


class Keeps(Adds):
    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.model.layers_to_capture = [3, 7]


class Wrapper:
    """Kimi-K2.5: the decoder is behind `language_model`."""

    def __init__(self, inner: Adds) -> None:
        self.language_model = inner

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.language_model.set_eagle3_layers_to_capture(ids)


@pytest.mark.parametrize("wanted", [(1, 29, 57), (3, 29, 57), (2, 30, 58), (5,)])
@pytest.mark.parametrize("make", [Adds, AddsWhenFirstIsOne, lambda: Wrapper(AddsWhenFirstIsOne())])
def test_what_is_captured_is_what_was_asked_for(make: Any, wanted: tuple[int, ...]) -> None:
    model = make()
    assert set_layers(model, wanted, 61) == wanted == read_layers(model)


def test_layers_that_do_not_read_back_are_refused() -> None:
    with pytest.raises(Refused, match=r"outputs of \[-1, 28, 56\].*\[1, 30, 58\]"):  # DeepSeek cannot be told so
        set_layers(AddsWhenFirstIsOne(), (0, 29, 57), 61)
    with pytest.raises(Refused, match=r"does not capture the outputs of layers \[1, 5\]"):
        set_layers(Keeps(), (1, 5), 61)
    with pytest.raises(Refused, match="cannot capture"):
        set_layers(SimpleNamespace(), (1, 5), 61)
    with pytest.raises(Refused, match="59 is the highest"):
        set_layers(Adds(), (1, 60), 61)
