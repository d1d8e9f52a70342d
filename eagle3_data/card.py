"""The data set card: what is in the folder, how it was made, and how to read it with and without this package.

The YAML head makes the folder load with plain `datasets`: explicit pattern and features (no inference read), exact
split sizes, and a version that changes with the content, since the Arrow cache of local folders is keyed by the card.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from eagle3_data import durable
from eagle3_data.manifest import Manifest
from eagle3_data.status import format_bytes

CARD = "README.md"
RECORD_FEATURES = (
    ("key", "string"),
    ("id", "string"),
    ("tokens", "int64"),
    ("supervised", "int64"),
    ("ids_digest", "string"),
    ("next_token", "int64"),
    ("checksum", "string"),
    ("stored", "string"),
)


def card_version(manifest: Manifest) -> str:
    """major.minor.patch with the content id in it: another content, another Arrow cache."""
    number = int(manifest.content_id, 16)
    return f"1.{number % 100_000}.{number // 100_000 % 100_000}"


def card_metadata(manifest: Manifest) -> dict[str, object]:
    return {
        "pretty_name": manifest.dataset,
        "tags": ["eagle3", "speculative-decoding", "hidden-states", "webdataset"],
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": manifest.split, "path": f"data/{manifest.split}-*.tar"}],
            }
        ],
        "dataset_info": {
            "version": card_version(manifest),
            "features": [
                {"name": "json", "struct": [{"name": name, "dtype": dtype} for name, dtype in RECORD_FEATURES]},
                {"name": "safetensors", "dtype": "binary"},
                {"name": "__key__", "dtype": "string"},
                {"name": "__url__", "dtype": "string"},
            ],
            "splits": [{"name": manifest.split, "num_bytes": manifest.nbytes, "num_examples": manifest.saved}],
            "download_size": manifest.nbytes,
            "dataset_size": manifest.nbytes,
        },
    }


def render_card(manifest: Manifest) -> str:
    spec, plan = manifest.spec, manifest.plan
    failed = sum(manifest.failed.values())
    skipped = sum(plan.skipped.values())
    servers = "\n".join(
        f"| {row.instance} | {row.sglang_version} | {row.path} | {row.device} | {row.tp_size} | {row.chunk_tokens} |"
        for row in manifest.servers
    )
    reasons = {**plan.skipped, **manifest.failed}
    lost = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or "none"
    last = "the last hidden state **after** the final norm" if spec.last == "hidden" else "no last hidden state"
    head = yaml.safe_dump(card_metadata(manifest), sort_keys=False)
    return f"""---
{head}---

# {manifest.dataset}

Hidden states of **{spec.model}** for EAGLE-3 draft training: for every token the outputs of decoder layers
{", ".join(map(str, spec.layers))} (residual stream; layer k is transformers' `hidden_states[k + 1]`) and {last}.

| | |
| --- | --- |
| samples | {manifest.saved:,} |
| tokens | {manifest.tokens:,} |
| shards | {len(manifest.shards):,} ({format_bytes(manifest.nbytes)}) |
| states | {spec.state_bytes_per_token:,} bytes per token, {spec.dtype}, width {spec.width} |
| planned | {plan.planned:,} = {manifest.saved:,} saved + {failed:,} failed + {skipped:,} skipped |
| not saved | {lost} |
| matching | {manifest.matching} |
| made by | {manifest.created_by} |

## Read it

With `pip install eagle3-data`:

```python
import eagle3_data
data = eagle3_data.load_dataset("path/or/repo/of/this/folder", split="{manifest.split}", streaming=True)
```

Without it, plain `datasets` or `webdataset`; each sample is `{{key}}.json` and `{{key}}.safetensors`:

```python
import safetensors.torch
from datasets import load_dataset
for row in load_dataset("path/or/repo/of/this/folder", split="{manifest.split}", streaming=True):
    tensors = safetensors.torch.load(row["safetensors"])
```

| tensor | shape | dtype |
| --- | --- | --- |
| `aux_hidden_states` | [tokens, {len(spec.layers)} x {spec.width}] | {spec.dtype} |
{f"| `last_hidden_state` | [tokens, {spec.width}] | {spec.dtype} |" if spec.last == "hidden" else ""}
| `input_ids` | [tokens] | int32 |
| `loss_mask` | [tokens] | uint8; 1 where the token was produced by the assistant |

## How it was made

| server | SGLang | capture | device | TP | chunk |
| --- | --- | --- | --- | --- | --- |
{servers}
"""


def write_card(folder: Path, manifest: Manifest) -> None:
    durable.write_text(folder / CARD, render_card(manifest))
