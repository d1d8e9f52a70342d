"""Kill -9 of a driver of `--engine ray`: Ray ends its workers, and the same command goes on with the same parts.

    python -m tests.builders.check_ray_driver

Not among the tests for its time: a minute or two, nearly all of it processes that start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray

from eagle3_data.builders.ray_crew import build_on_ray
from eagle3_data.manifest import Manifest
from eagle3_data.status import read_status
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples
from tests.models import tiny_model

SAMPLES = 160
LIMIT_S = 300.0


def placed(part: Path) -> int:
    """Samples in shards that are still open."""
    return sum(len(notes.read_text().splitlines()) for notes in (part / "data").glob(".*.placed"))


def kill_a_driver(builds: Builds, samples: Path, urls: tuple[str, ...], parts: list[Path]) -> None:
    """A driver of its own process, killed once both of its workers have placed something."""
    servers = [word for url in urls for word in ("--server", url)]
    options = ["--engine", "ray", "--shard-size", "64KiB", "--max-inflight", "2", *servers]
    arguments = ["build", str(samples), "--model", str(builds.model), "--out", str(builds.folder / "out"), *options]
    driver = subprocess.Popen(
        [sys.executable, "-c", "from eagle3_data.cli import main; main()", *arguments],
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
    )
    end = time.monotonic() + LIMIT_S
    while not all(placed(part) >= 5 for part in parts):
        assert driver.poll() is None, "the driver ended by itself"
        assert time.monotonic() < end
        time.sleep(0.02)
    driver.kill()
    driver.wait()


def main() -> None:
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    with tempfile.TemporaryDirectory(prefix="e3ray-", dir="/tmp") as folder:
        builds = Builds(Path(folder) / "work", tiny_model("llama"))
        builds.folder.mkdir()
        samples, out = write_samples(builds.folder / "s.jsonl", SAMPLES), builds.folder / "out"
        parts = [out / f".build/parts/{i}" for i in range(2)]
        ray.init(
            num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False, _temp_dir=folder
        )
        try:
            with builds.server(spool="a") as one, builds.server(spool="b") as two:
                one.delay_s = two.delay_s = 0.5
                kill_a_driver(builds, samples, (one.url, two.url), parts)
                assert read_status(out).state == "DEAD"
                kept = sum(placed(part) for part in parts)
                print(f"driver killed, {kept} samples were placed", flush=True)
                one.delay_s = two.delay_s = 0.0
                config = builds.config("out", samples, one.url, two.url, engine="ray", interval_s=0.2)
                report = build_on_ray(config, on_tick=builds.ticks.append, on_text=print)
                assert report.complete
                assert report.resumed >= kept
                assert report.sent + report.resumed + report.adopted == SAMPLES
                builds.run("calm", samples, one.url)
        finally:
            ray.shutdown()
        assert builds.shards("out") == builds.shards("calm")
        assert verify(out).problems == []
        assert Manifest.load(out).content_id == Manifest.load(builds.folder / "calm").content_id
        print(f"{report.resumed} samples kept, {report.sent} sent, the shards are the undisturbed build's")


if __name__ == "__main__":
    main()
