"""A stub hub that the real client talks to, and small builds to push."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from eagle3_data.hub.mirror import Mirror, make_mirror
from eagle3_data.hub.push import Push, PushConfig, PushReport
from eagle3_data.patience import Patience
from tests.hub.stub import HubStub

REPO = "org/states"
TOKEN = "hf_" + "s3cr3tT0kenValue00"
QUICK = Patience(first_s=0.05, longest_s=0.2, total_s=60.0)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    """No xet, basic LFS transfers, any token."""
    with HubStub(tmp_path / "hub") as stub:
        use(stub, monkeypatch)
        yield stub


def use(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the client of this process at the stub."""
    monkeypatch.setattr(constants, "ENDPOINT", stub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)


def opened(target: str = REPO, *, create: bool = True, patience: Patience = QUICK) -> Mirror:
    mirror = make_mirror(target, patience)
    mirror.open(create=create)
    return mirror


def push(folder: Path, target: str = REPO, *, patience: Patience = QUICK, **settings: object) -> PushReport:
    mirror = opened(target, patience=patience)
    try:
        config = PushConfig(**{"workers": 2, **settings})  # type: ignore[arg-type]
        return Push(folder, mirror, config, where=target).run()
    finally:
        mirror.close()
