"""The card: complete, parsed by the hub's own library, and true to the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from huggingface_hub import DatasetCard

from eagle3_data.capture import CaptureSpec
from eagle3_data.card import Publication, card_version, read_license, render_card
from eagle3_data.errors import ConfigError
from eagle3_data.manifest import Manifest, ServerRow
from tests.builds import make_build

SPEC = CaptureSpec(model="moonshotai/Kimi-K2.5", layers=(1, 29, 57), width=64, vocab_size=163_840)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Six samples saved, two failed, three left out."""
    make_build(tmp_path / "b", spec=SPEC)
    made = Manifest.load(tmp_path / "b")
    server = ServerRow(
        instance="i-1",
        sglang_version="0.5.23",
        plugin_version="0.1.0",
        path="native",
        device="cuda",
        tp_size=8,
        dp_size=1,
        chunk_tokens=8192,
    )
    plan = made.plan.model_copy(update={"samples": 8, "skipped": {"too_long": 3}})
    changes = {"dataset": "kimi_k25_synth", "plan": plan, "failed": {"timeout": 2}, "servers": (server,)}
    return made.model_copy(update={**changes, "samples": {"template": "a|b", "loss": "all-assistant"}})


def test_head(manifest: Manifest) -> None:
    """What the hub shows, and what plain `datasets` needs so that it infers nothing."""
    card = DatasetCard(render_card(manifest, Publication(where="org/states", license="cc-by-4.0")))
    head = card.data.to_dict()
    assert head["license"] == "cc-by-4.0"
    assert head["base_model"] == ["moonshotai/Kimi-K2.5"]
    assert head["pretty_name"] == "kimi_k25_synth"
    assert head["size_categories"] == ["n<1K"]
    assert {"eagle3", "hidden-states"} <= set(head["tags"])
    assert head["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.tar"}]}
    ]
    info = head["dataset_info"]
    assert info["splits"] == [{"name": "train", "num_bytes": manifest.nbytes, "num_examples": 6}]
    assert info["download_size"] == info["dataset_size"] == manifest.nbytes
    assert [feature["name"] for feature in info["features"]] == ["json", "safetensors", "__key__", "__url__"]
    assert info["version"] == card_version(manifest)


def test_text(manifest: Manifest) -> None:
    text = render_card(manifest, Publication(where="org/states", license="cc-by-4.0"))
    for part in (
        "layers\n1, 29, 57 (residual stream; layer k is transformers' `hidden_states[k + 1]`)",
        "the last hidden state **after** the final norm",
        "| planned | 11 = 6 saved + 2 failed + 3 skipped |",
        "| failed | timeout | 2 |",
        "| skipped | too_long | 3 |",
        f"| aux layers | [1, 29, 57], named by their {SPEC.convention} |",
        "| i-1 | 0.5.23 | native | cuda | 8 | 8192 |",
        "| samples: template | a\\|b |",
        "| license | cc-by-4.0 |",
        'load_dataset("eagle3_data/custom", mirror="org/states", split="train", streaming=True)',
        'load_dataset("org/states", split="train", streaming=True)',
        "eagle3-data pull org/states FOLDER",
        f"| version | {card_version(manifest)} (content {manifest.content_id}), complete |",
    ):
        assert part in text, part
    growing = manifest.model_copy(update={"state": "building", "failed": {}})
    assert "growing: 2 samples to come" in render_card(growing)


def test_every_content_has_a_version(manifest: Manifest) -> None:
    fewer = manifest.model_copy(update={"shards": manifest.shards[:-1]})
    assert card_version(fewer) != card_version(manifest)


def test_a_model_of_no_hub_and_no_license(manifest: Manifest) -> None:
    """A folder on the maker's disk is nobody else's business; a licence is not invented."""
    local = manifest.model_copy(update={"capture": {**manifest.capture, "model": "/home/me/secret/Kimi"}})
    text = render_card(local)
    assert "/home/me" not in text
    assert "**Kimi**" in text
    head = yaml.safe_load(text.split("---\n")[1])
    assert "base_model" not in head
    assert head["license"] == "unknown"


def test_licenses() -> None:
    assert read_license("---\nlicense: mit\n---\n") == "mit"
    for text in ("no head", "---\n: [\n---\n", "---\nlicense: [a, b]\n---\n", "---\nlicense: 'a b'\n---\n"):
        assert read_license(text) is None
    with pytest.raises(ConfigError, match="not a licence id"):
        Publication(license="My License")
