"""Decode speed of `bf16-planes` per core, whole and its parts, and the bytes it takes, at a real width.

    python -m benchmarks.planes [--data BUILD] [--rounds 9] [--out benchmarks/results/planes.json]

States: normal values, each channel with a scale of its own (log-normal), as bfloat16 [2048, 7168]; `--data` adds those
of a build, repeated to the same size. One thread; its CPU seconds, the best of the rounds, so that other work
on the machine weighs less. GB/s are of bfloat16. `zstd` is the bound: pyarrow's zstd on the high bytes, nothing else.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.host import Results
from eagle3_data.protocol import AUX
from eagle3_data.shards import ShardSet, planes
from eagle3_data.shards.stored import FRAME_VALUES

TOKENS, WIDTH = 2048, 7168


def made() -> Any:
    """uint16 bits [N]."""
    chooser = np.random.default_rng(0)
    scales = np.exp(0.7 * chooser.standard_normal(WIDTH).astype(np.float32))
    values = chooser.standard_normal((TOKENS, WIDTH), dtype=np.float32) * scales
    return bits_of(torch.from_numpy(values))


def bits_of(values: torch.Tensor) -> Any:
    return values.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1)


def from_build(folder: Path) -> Any:
    data = ShardSet.open(folder)
    parts = [bits_of(data.read(i)[AUX]) for i in range(min(64, len(data)))]
    return np.resize(np.concatenate(parts), TOKENS * WIDTH)


def measure(bits: Any, rounds: int) -> dict[str, float]:
    sizes, low, frames = planes.split_planes(bits)
    packed = np.concatenate([np.frombuffer(frame, np.uint8) for frame in frames])
    out, starts = np.empty_like(bits), np.cumsum(sizes) - sizes

    def unpack() -> None:
        for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            planes._unpack(packed[start : start + size], min(FRAME_VALUES, len(bits) - number * FRAME_VALUES))

    def speed(work: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(rounds):
            began = time.thread_time()
            work()
            best = min(best, time.thread_time() - began)
        return float(bits.nbytes / best / 1e9)

    found = {
        "of_bf16": (len(packed) + len(low)) / bits.nbytes,
        "zstd_gb_per_s": speed(unpack),
        "copy_gb_per_s": speed(lambda: np.copyto(out, bits)),
        "encode_gb_per_s": speed(lambda: planes.split_planes(bits)),
        "decode_gb_per_s": speed(lambda: planes.join_planes(sizes, low, packed, out)),
    }
    assert np.array_equal(out, bits)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/planes.json"))
    asked = parser.parse_args()
    results = Results(asked.out, "planes", {"tokens": TOKENS, "width": WIDTH, "rounds": asked.rounds}, "cpu")
    planes._threads = lambda: 1
    results.add(states="made", **measure(made(), asked.rounds))
    if asked.data:
        results.add(states="build", **measure(from_build(asked.data), asked.rounds))


if __name__ == "__main__":
    main()
