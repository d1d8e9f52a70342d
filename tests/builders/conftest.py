"""Served-id samples (no tokenizer needed) and a build over the replaying server."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3_data.builders.build import build
from eagle3_data.builders.pool import FlowConfig
from eagle3_data.builders.settings import BuildConfig, BuildReport
from eagle3_data.journal import Tick
from tests.models import VOCAB, tiny_model
from tests.replay import SPEC, Faults, ReplayServer


def write_samples(path: Path, count: int, *, seed: int = 0, lengths: tuple[int, int] = (4, 60)) -> Path:
    """Rows that carry their ids and mask, as `synth` writes them."""
    chooser = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            ids = [chooser.randrange(VOCAB) for _ in range(chooser.randint(*lengths))]
            mask = [0] * (len(ids) // 2) + [1] * (len(ids) - len(ids) // 2)
            row = {"id": f"row-{number}", "input_ids": ids, "loss_mask": mask}
            file.write(json.dumps(row) + "\n")
    return path


class Builds:
    """Runs builds in this process with quick timeouts."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.ticks: list[Tick] = []
        self.texts: list[str] = []

    def config(self, out: str, samples: Path, *urls: str, **changes: Any) -> BuildConfig:
        flow = FlowConfig(
            max_inflight=changes.pop("max_inflight", 8),
            request_timeout_s=changes.pop("request_timeout_s", 5.0),
            dump_timeout_s=changes.pop("dump_timeout_s", 1.0),
            server_timeout_s=changes.pop("server_timeout_s", 3.0),
            retries=changes.pop("retries", 3),
            grace_s=1.0,
        )
        defaults: dict[str, Any] = {"shard_bytes": 64 << 10, "interval_s": 0.2, "flow": flow}
        return BuildConfig(
            out=self.folder / out,
            inputs=(str(samples),),
            model=str(self.model),
            servers=urls,
            **{**defaults, **changes},
        )

    def server(self, faults: Faults | None = None, spool: str = "spool", **info: Any) -> ReplayServer:
        spec = replace(SPEC, model=str(self.model), vocab_size=VOCAB)
        return ReplayServer(self.folder / spool, spec, faults, **info)

    def run(self, out: str, samples: Path, *urls: str, **changes: Any) -> BuildReport:
        return build(self.config(out, samples, *urls, **changes), on_tick=self.ticks.append, on_text=self.texts.append)

    def shards(self, out: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self.folder / out / "data").glob("*.tar"))}


@pytest.fixture
def builds(tmp_path: Path) -> Builds:
    return Builds(tmp_path, tiny_model("llama"))
