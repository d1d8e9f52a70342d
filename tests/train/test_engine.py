"""What `accelerate launch` asks for, and what we make of it."""

from __future__ import annotations

import pytest
import torch

from eagle3_data.errors import ConfigError, TrainingError
from eagle3_data.train.engine import fsdp2_plugin, raise_together


def test_fsdp2_rounds_nothing_but_the_weights_that_are_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's own bf16 policy also rounds the counts that go in, the sums that come out, and sums of gradients."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")  # what the launcher sets unless told otherwise
    plugin = fsdp2_plugin(bf16=True)
    assert plugin is not None
    plugin.set_mixed_precision("bf16")  # as Accelerate does with every plugin
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
    assert not policy.cast_forward_inputs
    assert plugin.auto_wrap_policy is None
    assert not plugin.cpu_ram_efficient_loading


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("FSDP_VERSION", "1", "fsdp_version 2"), ("FSDP_OFFLOAD_PARAMS", "true", "leave it off")],
)
def test_other_ways_of_sharding_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        fsdp2_plugin(bf16=False)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    assert fsdp2_plugin(bf16=False) is None


def test_all_ranks_raise_and_the_failing_one_its_own_error() -> None:
    raise_together(0.0, None)
    with pytest.raises(OSError, match="disk"):
        raise_together(1.0, OSError("disk"))
    with pytest.raises(TrainingError, match="another rank"):
        raise_together(1.0, None)
