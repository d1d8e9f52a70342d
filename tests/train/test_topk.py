"""Training from `--last topk:K`: with K = the whole vocabulary it is the training from last states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from eagle3_data.capture import TOP_IDS, TOP_LOGPROBS
from eagle3_data.head import TargetHead
from eagle3_data.protocol import LAST
from eagle3_data.train.checkpoint import DRAFT, checkpoints
from eagle3_data.train.target import read_target_info
from eagle3_data.train.teacher import Teacher, TopKTeacher, pack_top
from eagle3_data.train.trainer import Trainer
from tests.train.conftest import MakeConfig
from tests.train.fakes import MemorySamples, random_samples


def teachers(target: Path, kept: torch.Tensor) -> tuple[TargetHead, Teacher, TopKTeacher]:
    info = read_target_info(target)
    head = TargetHead.load(str(target), width=info.hidden_size)
    return head, Teacher(head.weight, info, kept), TopKTeacher(info, kept)


def test_all_tokens_give_the_whole_distribution(sharp_target: Path) -> None:
    kept = torch.arange(0, 512, 2)
    head, whole, top = teachers(sharp_target, kept)
    last = torch.randn(20, head.weight.shape[1], generator=torch.Generator().manual_seed(0))
    expected = whole.rows(last)
    found = top.rows(pack_top(*head.top(last, head.vocab_size)))
    assert torch.equal(found.top1_C, expected.top1_C)
    for name in ("draft_CD", "coverage_C", "entropy_C"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=5e-3, atol=1e-4)
    assert torch.equal(top.top1_in_draft(pack_top(*head.top(last, 3)), 7), whole.top1_in_draft(last, 7))


def test_what_is_outside_the_k_counts_as_outside_the_draft(sharp_target: Path) -> None:
    kept = torch.arange(0, 512, 2)
    head, whole, top = teachers(sharp_target, kept)
    last = torch.randn(50, head.weight.shape[1], generator=torch.Generator().manual_seed(1))
    ids, logprobs = head.top(last, 4)
    found = top.rows(pack_top(ids, logprobs))
    own = whole.rows(last)
    exact = own.draft_CD * own.coverage_C[:, None]
    mine = found.draft_CD * found.coverage_C[:, None]
    torch.testing.assert_close(found.draft_CD.sum(-1), torch.ones(50))
    assert (mine <= exact * 1.01 + 1e-5).all()
    torch.testing.assert_close(mine[mine > 0], exact[mine > 0], rtol=5e-3, atol=1e-5)
    nothing = ~top.in_draft[ids.long()].any(-1)
    assert nothing.any()
    assert (found.coverage_C[nothing] == 0).all()
    torch.testing.assert_close(found.draft_CD[nothing], torch.full_like(found.draft_CD[nothing], 1 / len(kept)))


def as_top_k(data: MemorySamples, head: TargetHead, k: int) -> MemorySamples:
    samples = []
    for sample in data.samples:
        ids, logprobs = head.top(sample[LAST], k)
        kept = {name: tensor for name, tensor in sample.items() if name != LAST}
        samples.append({**kept, TOP_IDS: ids, TOP_LOGPROBS: logprobs})
    return MemorySamples(replace(data.capture, last=f"topk:{k}"), samples)


def test_a_run_from_top_k_is_the_run_from_last_states(
    make_config: MakeConfig, sharp_target: Path, tmp_path: Path
) -> None:
    info = read_target_info(sharp_target)
    data = random_samples([40, 60, 30, 80] * 4, width=info.hidden_size, vocab=info.vocab_size)
    head = TargetHead.load(str(sharp_target), width=info.hidden_size)
    weights = {}
    for name, source in (
        ("last", data),
        ("top", as_top_k(data, head, info.vocab_size)),
        ("few", as_top_k(data, head, 2)),
    ):
        config = make_config("optim.epochs=1", target=sharp_target, output=tmp_path / name)
        trainer = Trainer(config, source)
        trainer.run()
        saved = load_file(checkpoints(config.run.output)[-1] / DRAFT)
        weights[name] = torch.cat(
            [saved[key].float().flatten() for key in sorted(saved) if saved[key].is_floating_point()]
        )
    assert LAST not in as_top_k(data, head, 2).samples[0]
    near = (weights["top"] - weights["last"]).norm()
    far = (weights["few"] - weights["last"]).norm()
    assert near < 0.2 * far
