"""Configurations that would spoil data or stop a run half way; each with what was found and what to pass instead."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_data.patches.sglang.facts import data_parallel_ranks
from eagle3_data.protocol import SPOOL_ENV, SpoolConfig

PREFIX = "eagle3-data refuses to capture: "
"""Every refusal starts so; `ServerProcess` looks for it in the server's log."""

OLDEST, NATIVE, NEWEST = (0, 5, 14), (0, 5, 23), (0, 6, 0)
"""First version with plugins; first with its own aux capture; first that nobody has tried."""


class Refused(RuntimeError):
    """Raised inside SGLang's scheduler, which logs it and brings the server down."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(PREFIX + problem for problem in problems))


def parse_version(version: str) -> tuple[int, int, int]:
    """`0.5.23`, `0.5.14.post1`, `0.5.24.dev3+gabc` as three numbers. SystemExit for anything else or out of range."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2]), int(match[3])) if match else None
    if found is None or not OLDEST <= found < NEWEST:
        raise SystemExit(
            f"{PREFIX}SGLang {version} is not supported; install sglang >= 0.5.14, < 0.6 "
            f"or unset {SPOOL_ENV} to serve without capture"
        )
    return found


def argument_refusals(args: Mapping[str, Any]) -> list[str]:
    """Problems visible in SGLang's arguments alone, so that a server fails before it has loaded a large model.

    `args` are server arguments by name; a name that this SGLang version does not have counts as off.
    """
    found = []
    if not args.get("disable_radix_cache", False):
        found.append(
            "the radix cache is on: a prompt that shares a prefix would be captured short; pass --disable-radix-cache"
        )
    if args.get("allow_auto_truncate"):
        found.append("--allow-auto-truncate is on: long prompts would be cut silently; leave it out")
    if (args.get("pp_size") or 1) > 1:
        found.append(
            f"pipeline parallel size is {args['pp_size']}: aux layers of other stages are out of reach; use --tp"
        )
    for name in ("attn_cp_size", "dcp_size"):
        if (args.get(name) or 1) > 1:
            found.append(f"context parallel is on ({name}={args[name]}): rows would be split over ranks; set it to 1")
    for name in ("enable_prefill_cp", "enable_prefill_context_parallel", "enable_nsa_prefill_context_parallel"):
        if args.get(name):
            found.append(f"context parallel is on ({name}): rows would be split over ranks; leave it out")
    if args.get("enable_two_batch_overlap"):
        found.append("--enable-two-batch-overlap splits a batch's rows in two; leave it out")
    if args.get("enable_layernorm_sp"):
        found.append("--enable-layernorm-sp leaves the aux states split over ranks; leave it out")
    if args.get("speculative_draft_model_path"):
        found.append(
            f"a draft is loaded ({args['speculative_draft_model_path']}): capture needs the target alone; "
            "leave out --speculative-draft-model-path"
        )
    return found


def native_refusals(args: Mapping[str, Any]) -> list[str]:
    """SGLang 0.5.23 and newer capture by themselves when two flags are given."""
    if args.get("enable_return_aux_hidden_states"):
        method = args.get("aux_hidden_state_capture") or str(args.get("speculative_algorithm") or "").lower()
        if method == "eagle3":
            return []
        return [f"aux states are captured by the {method!r} convention; pass --speculative-algorithm EAGLE3"]
    return [
        "SGLang's aux capture is off; pass --enable-return-aux-hidden-states --speculative-algorithm EAGLE3 "
        "(`eagle3-data serve` passes them)"
    ]


def hook_refusals(args: Mapping[str, Any]) -> list[str]:
    """What hooks cannot capture through, and SGLang's own capture since 0.5.23 can."""
    return [] if args.get("device", "cuda") == "cpu" else [*_prefill_graphs(args), *_fused_sums(args)]


def _prefill_graphs(args: Mapping[str, Any]) -> list[str]:
    """A replayed prefill graph builds a new result, and what a hook attached to the old one is lost."""
    config = args.get("cuda_graph_config")
    prefill = config.get("prefill") if isinstance(config, Mapping) else getattr(config, "prefill", None)
    if prefill is None:  # before per-phase settings
        names = ("disable_cuda_graph", "disable_prefill_cuda_graph", "disable_piecewise_cuda_graph")
        off = any(args.get(name) for name in names)
    else:  # what SGLang resolved; `--cuda-graph-config` wins over the flags that switch graphs off
        backend = prefill.get("backend") if isinstance(prefill, Mapping) else getattr(prefill, "backend", "")
        off = "disabled" in str(backend).lower()
    if off:
        return []
    return ["prefill CUDA graphs are on, which this SGLang cannot be captured through; pass --disable-cuda-graph"]


def _fused_sums(args: Mapping[str, Any]) -> list[str]:
    """SGLang adds the ranks' shares of a layer's output inside the next layer's norm, by itself on Hopper and newer.

    gpt-oss and GLM-4 record a layer's output before that: it would be one rank's share, finite and wrong.
    """
    if (args.get("tp_size") or 1) == 1 or args.get("enable_dp_attention"):
        return []
    ways_out = {
        "flashinfer_allreduce_fusion_backend": "pass --enforce-disable-flashinfer-allreduce-fusion",
        "enable_aiter_allreduce_fusion": "leave out --enable-aiter-allreduce-fusion",
    }
    return [
        f"tensor parallel sums are fused into the next layer ({name}={args[name]}), so a layer's output would be "
        f"captured as one rank's share; {way_out}"
        for name, way_out in ways_out.items()
        if args.get(name)
    ]


def node_refusals(args: Mapping[str, Any], config: SpoolConfig) -> list[str]:
    """Data-parallel ranks of several nodes each write their own dumps: clients must find them all in one place."""
    nodes, ranks = args.get("nnodes") or 1, data_parallel_ranks(args)
    if nodes > 1 and ranks > 1 and not config.shared_spool:
        return [
            f"{ranks} data-parallel ranks on {nodes} nodes write dumps, and nothing says that the spool is one folder "
            'for all of them; put it on a shared file system and set "shared_spool": true in its eagle3.json'
        ]
    return []


def writes_here(args: Mapping[str, Any]) -> bool:
    """Whether this node can have a rank that writes: without data parallelism only the first node has one."""
    return data_parallel_ranks(args) > 1 or not args.get("node_rank")


def spool_refusals(spool: Path, config: SpoolConfig) -> list[str]:
    """The spool must exist, be writable by this server and have room for twice the high-water mark."""
    try:
        with tempfile.NamedTemporaryFile(dir=spool, prefix=".probe-"):
            pass
    except OSError as error:
        return [f"the spool {spool} is not writable ({error.strerror}); create it or point {SPOOL_ENV} elsewhere"]
    free = free_bytes(spool)
    if free < 2 * config.high_water_bytes:
        return [
            f"the spool {spool} has {free:,} bytes free, and twice its high-water mark of "
            f'{config.high_water_bytes:,} is needed; free space or lower "high_water_bytes" in its eagle3.json'
        ]
    return []


def free_bytes(spool: Path) -> int:
    """Bytes a process without privileges may still write on the spool's file system."""
    found = os.statvfs(spool)
    return found.f_bavail * found.f_frsize
