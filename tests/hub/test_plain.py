"""A published build without this package: plain `datasets` on the hub, in a process that never imports ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle3_data.shards.layout import remote_path
from tests.builds import make_build
from tests.hub.conftest import REPO, TOKEN, push
from tests.hub.stub import HubStub
from tests.hub.test_push import LENGTHS

pytestmark = pytest.mark.xdist_group("hub")

PLAIN = """
import gc, sys
gc.disable()  # a collection inside httpcore's lock that closes an abandoned file of the hub's client waits forever
from datasets import get_dataset_config_info, load_dataset
import safetensors.torch, torch
repository, expected, kind = sys.argv[1], torch.load(sys.argv[2], weights_only=True), sys.argv[3]
info = get_dataset_config_info(repository)
assert info.splits["train"].num_examples == len(expected), info.splits
data = load_dataset(repository, split="train", streaming=kind == "stream")
assert kind != "stream" or data.num_shards == 6
rows = list(data)
assert len(rows) == len(expected)
for row, (aux, last, ids, mask) in zip(rows, expected):
    tensors = safetensors.torch.load(row["safetensors"])
    assert tensors["aux_hidden_states"].dtype is torch.bfloat16
    assert torch.equal(tensors["aux_hidden_states"], aux) and torch.equal(tensors["last_hidden_state"], last)
    assert torch.equal(tensors["input_ids"], ids) and torch.equal(tensors["loss_mask"], mask)
    assert row["json"]["tokens"] == len(ids)
assert not any(name.split(".")[0] == "eagle3_data" for name in sys.modules)
print("PLAIN DATASETS AGREES", len(rows))
"""


@pytest.mark.parametrize(("kind", "token"), [("stream", None), ("stream", TOKEN), ("whole", None)])
def test_plain_datasets_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, token: str | None
) -> None:
    """`load_dataset("org/states")` with HF_ENDPOINT, as a stream and whole: all from the hub, bit for bit (C43)."""
    from tests.hub.conftest import use

    dumps = make_build(tmp_path / "data", LENGTHS)
    torch.save([(dump.aux, dump.last, dump.ids, dump.mask) for dump in dumps], tmp_path / "expected")
    with HubStub(tmp_path / "hub", token=token) as hub:
        use(hub, monkeypatch)
        assert push(tmp_path / "data").complete
        hub.seen.clear()
        environment = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "PATH": "/usr/bin:/bin"}
        arguments = [REPO, str(tmp_path / "expected"), kind]
        done = subprocess.run(
            [sys.executable, "-c", PLAIN, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**environment, **({"HF_TOKEN": token} if token else {})},
            timeout=240,
        )
        assert f"PLAIN DATASETS AGREES {len(dumps)}" in done.stdout, done.stderr[-3000:]
        for number in range(6):
            path = remote_path(f"train-{number:06d}.tar")
            assert hub.requests("GET", f"/datasets/{REPO}/resolve/.*/{path}"), f"{path} did not come from the stub"
        assert hub.requests("GET", rf"/api/datasets/{REPO}")
        if token:
            assert all(seen.authorization == f"Bearer {token}" for seen in hub.requests("GET", r"\.tar"))
