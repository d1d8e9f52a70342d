"""From opening a data set of 100,000 samples to its first micro-batch, and to the end of the vocabulary count.

    python -m benchmarks.first_batch [--samples 100000]

The shards hold a few hundred different samples; the index names each of them many times under other keys, so that the
index, the split, the plan and the first reads are those of a large data set without its bytes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_data.manifest import Manifest
from eagle3_data.protocol import IDS, MASK
from eagle3_data.shards import ShardSet
from eagle3_data.shards.index import whole_path
from eagle3_data.train.config import BatchConfig, DataConfig
from eagle3_data.train.loader import BufferPool, Collator, Prefetcher
from eagle3_data.train.plan import Cursor, EpochPlan, split_samples
from eagle3_data.train.vocab import build_map, count_tokens
from tests.builds import SPEC, make_build

DIFFERENT = 400


def enlarge(folder: Path, samples: int) -> None:
    """Name every sample of the index again and again, `samples` rows in all."""
    path = whole_path(folder, "train")
    table = pq.read_table(path)
    rows = pa.array(np.sort(np.arange(samples) % len(table)))  # a shard's samples stand together
    large = table.take(rows)
    keys = pa.array([f"{i:08d}" for i in range(samples)])
    pq.write_table(large.set_column(large.schema.get_field_index("key"), "key", keys), path)
    counts = Counter(large.column("shard").to_pylist())
    manifest = Manifest.load(folder)
    shards = tuple(row.model_copy(update={"samples": counts[row.name]}) for row in manifest.shards)
    manifest.model_copy(update={"shards": shards}).save(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    args = parser.parse_args()
    data_config = DataConfig(folder=Path("unused"), max_sample_tokens=512)
    batch = BatchConfig(micro_batch_tokens=2048)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "build"
        make_build(folder, lengths=np.random.default_rng(0).integers(16, 512, DIFFERENT).tolist(), per_shard=50)
        enlarge(folder, args.samples)
        began = time.perf_counter()
        data = ShardSet.open(folder)
        opened = time.perf_counter()
        split = split_samples(data.keys, data.tokens, data_config, seed=0)
        plan = EpochPlan(split, data.tokens, batch, max_sample_tokens=512, seed=0, fingerprint=data.fingerprint)
        steps = plan.steps(Cursor(), rank=0, world=1, epochs=1)
        collator = Collator(data, max_sample_tokens=512, steps=7, alignment="strict", reader_threads=2)
        pool = BufferPool(data.capture, positions=plan.largest_batch(), count=4, pinned=False)
        with Prefetcher(steps, collator, pool, depth=3) as loader:
            _, batches = next(iter(loader))
            next(batches)
            first = time.perf_counter()
        print(f"{len(data):,} samples: index {opened - began:.2f} s, first micro-batch {first - began:.2f} s")
        print(f"read-ahead buffers: {pool.nbytes:,} bytes")
        began = time.perf_counter()
        reads = (data.read(int(i), (IDS, MASK)) for i in split.train)
        build_map(count_tokens(((read[IDS], read[MASK]) for read in reads), SPEC.vocab_size), 64)
        print(
            f"vocabulary count: {len(split.train) / (time.perf_counter() - began):,.0f} samples/s, once per run folder"
        )


if __name__ == "__main__":
    main()
