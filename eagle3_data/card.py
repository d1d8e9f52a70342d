"""The data set card: what is in the folder, how it was made, and how to read it with and without this package.

The YAML head makes the folder load with plain `datasets`: explicit pattern and features (no inference read), exact
split sizes, and a version that changes with the content, since the Arrow cache of local folders is keyed by the card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eagle3_data import durable
from eagle3_data.capture import TOP_IDS, TOP_LOGPROBS, CaptureSpec
from eagle3_data.errors import ConfigError
from eagle3_data.manifest import FAILURES, Manifest
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


SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))
LICENSE = "unknown"
LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """What the card of a mirror says beyond the manifest."""

    where: str = ""
    """`org/name` on a hub, or a URL; empty for a local folder."""
    license: str = LICENSE
    """Licence id of the hub (`apache-2.0`, `cc-by-4.0`, `other`): of the conversations and the model's output."""
    folders: bool = False
    """Shards lie in sub-folders of `data/`, too (from shard 9,000 on)."""

    def __post_init__(self) -> None:
        if not LICENSE_ID.fullmatch(self.license):
            raise ConfigError(f"--license {self.license!r} is not a licence id", next="for example apache-2.0 or other")


LOCAL = Publication()


def read_license(card: str) -> str | None:
    """The `license` of a published card's head; None when there is none."""
    parts = card.split("---\n", 2)
    if len(parts) < 3:
        return None
    try:
        head: Any = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return None
    found = head.get("license") if isinstance(head, dict) else None
    return found if isinstance(found, str) and LICENSE_ID.fullmatch(found) else None


def card_version(manifest: Manifest) -> str:
    """major.minor.patch with the content id in it: another content, another Arrow cache."""
    number = int(manifest.content_id, 16)
    return f"1.{number % 100_000}.{number // 100_000 % 100_000}"


def card_metadata(manifest: Manifest, publication: Publication = LOCAL) -> dict[str, Any]:
    """The YAML head: what the hub shows and what plain `datasets` needs."""
    patterns = [f"data/{manifest.split}-*.tar"]
    if publication.folders:
        patterns.append(f"data/*/{manifest.split}-*.tar")
    model = {"base_model": [manifest.spec.model]} if is_hub_id(manifest.spec.model) else {}
    return {
        "pretty_name": manifest.dataset,
        "license": publication.license,
        **model,
        "task_categories": ["text-generation"],
        "size_categories": [size_category(manifest.saved)],
        "tags": ["eagle3", "speculative-decoding", "hidden-states", "webdataset"],
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": manifest.split, "path": patterns if len(patterns) > 1 else patterns[0]}],
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


def is_hub_id(model: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", model, re.ASCII) is not None and not model.startswith(".")


def size_category(samples: int) -> str:
    return next((name for limit, name in SIZES if samples < limit), "n>10M")


def _last_rows(spec: CaptureSpec) -> str:
    if spec.top_k:
        ids = f"| `{TOP_IDS}` | [tokens, {spec.top_k}] | int32, most probable first |"
        return f"{ids}\n| `{TOP_LOGPROBS}` | [tokens, {spec.top_k}] | float16, over the whole vocabulary |"
    return f"| `last_hidden_state` | [tokens, {spec.width}] | {spec.dtype} |" if spec.last == "hidden" else ""


def render_card(manifest: Manifest, publication: Publication = LOCAL) -> str:
    spec, plan = manifest.spec, manifest.plan
    failed, skipped = sum(manifest.failed.values()), sum(plan.skipped.values())
    open_ = plan.planned - manifest.saved - failed - skipped
    if spec.top_k:
        last = f"the target's {spec.top_k} most probable next tokens instead of the last hidden state"
    elif spec.last == "hidden":
        last = "the last hidden state **after** the final norm"
    else:
        last = "no last hidden state"
    model = spec.model if is_hub_id(spec.model) else Path(spec.model).name
    head = yaml.safe_dump(card_metadata(manifest, publication), sort_keys=False)
    state = "complete" if manifest.state == "complete" and not open_ else f"growing: {open_:,} samples to come"
    return f"""---
{head}---

# {manifest.dataset}

Hidden states of **{model}** for EAGLE-3 draft training: for every token the outputs of decoder layers
{", ".join(map(str, spec.layers))} (residual stream; layer k is transformers' `hidden_states[k + 1]`) and {last}.

| | |
| --- | --- |
| version | {card_version(manifest)} (content {manifest.content_id}), {state} |
| samples | {manifest.saved:,} |
| tokens | {manifest.tokens:,} |
| shards | {len(manifest.shards):,} ({format_bytes(manifest.nbytes)}) |
| states | {spec.state_bytes_per_token:,} bytes per token, {spec.dtype}, width {spec.width} |
| planned | {plan.planned:,} = {manifest.saved:,} saved + {failed:,} failed + {skipped:,} skipped{_more(open_)} |
| matching | {manifest.matching} |
| made by | {manifest.created_by} |
| license | {publication.license} |

## Read it

{_reading(manifest, publication)}

| tensor | shape | dtype |
| --- | --- | --- |
| `aux_hidden_states` | [tokens, {len(spec.layers)} x {spec.width}] | {spec.dtype} |
{_last_rows(spec)}
| `input_ids` | [tokens] | int32 |
| `loss_mask` | [tokens] | uint8; 1 where the token was produced by the assistant |

`manifest.json` has the checksum of every shard, `index/{manifest.split}.parquet` the place of every sample.

## Capture

| | |
| --- | --- |
| model | {model} |
| aux layers | {list(spec.layers)}, named by their {spec.convention} |
| last state | {spec.last}, norm {spec.norm} |
| dtype, width | {spec.dtype}, {spec.width} |
| vocabulary | {spec.vocab_size:,} |
{_rows(manifest.samples)}

## How it was made

Each conversation was prefilled once by a patched SGLang server; its states were accepted only with the request's own
id, token count and ids, and only when the stored bytes gave the server's checksum.

| server | SGLang | capture | device | TP | chunk |
| --- | --- | --- | --- | --- | --- |
{_servers(manifest)}

## Not in it

{_lost(manifest)}
"""


def _more(count: int) -> str:
    return f" + {count:,} to come" if count else ""


def _reading(manifest: Manifest, publication: Publication) -> str:
    split, where = manifest.split, publication.where or "path/of/this/folder"
    argument = f'mirror="{where}"' if publication.where else f'data_dir="{where}"'
    plain = where if "://" not in where else "a/local/copy"
    return f"""With `pip install eagle3-data` (tensors as `torch.bfloat16`, by ranges or by mmap):

```python
import eagle3_data
data = eagle3_data.load_dataset("eagle3_data/custom", {argument}, split="{split}", streaming=True)
```

Without it, plain `datasets` or `webdataset`; each sample is `{{key}}.json` and `{{key}}.safetensors`:

```python
import safetensors.torch
from datasets import load_dataset
for row in load_dataset("{plain}", split="{split}", streaming=True):
    tensors = safetensors.torch.load(row["safetensors"])
```

A copy with every checksum checked: `eagle3-data pull {where} FOLDER`"""


def _rows(values: dict[str, Any]) -> str:
    return "\n".join(f"| samples: {name} | {_cell(value)} |" for name, value in sorted(values.items()))


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _servers(manifest: Manifest) -> str:
    return "\n".join(
        f"| {row.instance} | {row.sglang_version} | {row.path} | {row.device} | {row.tp_size} | {row.chunk_tokens} |"
        for row in manifest.servers
    )


def _lost(manifest: Manifest) -> str:
    rows = [("failed", reason, count) for reason, count in sorted(manifest.failed.items())]
    rows += [("skipped", reason, count) for reason, count in sorted(manifest.plan.skipped.items())]
    if not rows:
        return "Nothing that was planned is missing."
    lines = "\n".join(f"| {what} | {_cell(reason)} | {count:,} |" for what, reason, count in rows)
    return f"Each failed sample has a row in `{FAILURES}`.\n\n| | reason | samples |\n| --- | --- | --- |\n{lines}"


def write_card(folder: Path, manifest: Manifest) -> None:
    durable.write_text(folder / CARD, render_card(manifest))
