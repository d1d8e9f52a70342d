"""The vLLM export in speculators' own classes: it loads whole and computes the same states.."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_data.train.checkpoint import read_draft
from eagle3_data.train.config import LossConfig, LossKind
from eagle3_data.train.draft import Eagle3Draft
from eagle3_data.train.export import export_draft
from tests.train.reference import decoded_states
from tests.train.test_export import checkpoint
from tests.train.test_losses import Case, V, speculators_style

eagle3 = pytest.importorskip(
    "speculators.models.eagle3", reason="pip install --no-deps speculators hs-connectors pydantic-settings loguru"
)
LENGTH, STEPS = 129, 3
"""speculators' attention mask wants multiples of 128; it drops the first token."""


def test_loads_and_computes_the_same(tmp_path: Path, tiny_llama: Path) -> None:
    checkpoint(
        tmp_path / "c",
        hidden_size=64,
        vocab_size=768,
        target_model=str(tiny_llama),
        fc_norm=True,
        norm_output=True,
    )
    folder = export_draft(tmp_path / "c", tmp_path / "out", engine="vllm", dtype="float32").folder
    theirs = eagle3.Eagle3DraftModel.from_pretrained(folder)
    tensors, loaded = load_file(folder / "model.safetensors"), theirs.state_dict()
    assert set(loaded) - set(tensors) == {
        "verifier_norm.weight",
        "verifier_lm_head.weight",
    }  # the target's, for training
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name].to(tensor.dtype), tensor), name
    assert theirs.config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]

    saved = read_draft(tmp_path / "c")
    ours = Eagle3Draft(saved.spec, tensors["embed_tokens.weight"])
    ours.load_state_dict({name: t for name, t in saved.tensors.items() if name not in ("d2t", "t2d")}, strict=False)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 768, (LENGTH,), generator=generator)
    aux = torch.randn(LENGTH, 192, generator=generator)
    expected = decoded_states(ours, ids, aux, STEPS)
    states: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda module, inputs, output: states.append(inputs[0].detach()))
    with torch.no_grad():
        theirs(
            hidden_states=aux[None, :-1],
            input_ids=ids[None, 1:],
            document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long),
            ttt_steps=STEPS,
        )
    for step, found in enumerate(states):
        count = LENGTH - 1 - step
        torch.testing.assert_close(found[0, :count], expected[step, :count], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("theirs", "ours"), [("kl_div", "kl"), ("nla", "lk_alpha"), ("lk_hybrid", "lk_lambda")])
def test_losses_equal_speculators_own_functions(theirs: str, ours: LossKind) -> None:
    """Over the whole vocabulary: they take the acceptance rate within the draft's, we within the target's."""
    losses = pytest.importorskip("speculators.losses.eager")
    names = {"kl_div": "kl_div_loss", "nla": "neg_log_acceptance_loss", "lk_hybrid": "lk_hybrid_loss"}
    case = Case(draft_vocab=V)
    reference = speculators_style(case, 3, 1.0, getattr(losses, names[theirs]))
    config = LossConfig(kind=ours, denominator="tokens", out_of_vocab="keep", chunk_bytes=1 << 16)
    found = case.ours(config, "input", 1.0, steps=3)
    # their hybrid has the divergence where ours has the cross-entropy: same gradients, another constant
    for mine, other in list(zip(found, reference, strict=True))[ours == "lk_lambda" :]:
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
