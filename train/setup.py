"""From settings to the objects of a run: target, vocabulary map, draft, plan. Each phase prints a line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from eagle3_data.checkpoint import resolve_checkpoint
from eagle3_data.train.config import TrainConfig
from eagle3_data.train.draft import Eagle3Draft
from eagle3_data.train.loader import Samples
from eagle3_data.train.plan import EpochPlan, split_samples
from eagle3_data.train.spec import DraftSpec, draft_spec
from eagle3_data.train.target import (
    TargetInfo,
    TargetWeights,
    read_target_info,
    read_target_weights,
)
from eagle3_data.train.teacher import Teacher, TopKTeacher
from eagle3_data.train.ttt import TttModel
from eagle3_data.train.vocab import VocabMap
from eagle3_data.train.vocab_choice import make_vocab
from eagle3_data.train.warm import read_warm

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a run is made of."""

    spec: DraftSpec
    info: TargetInfo
    vocab: VocabMap
    model: TttModel
    plan: EpochPlan


def make_plan(config: TrainConfig, data: Samples, say: Say) -> EpochPlan:
    split = split_samples(data.keys, data.tokens, config.data, seed=config.optim.seed)
    say(
        f"data: {len(split.train):,} samples to train on ({int(data.tokens[split.train].sum()):,} tokens), "
        f"{len(split.holdout):,} held out, {split.dropped:,} dropped as too short, "
        f"{split.cut:,} cut to {config.data.max_sample_tokens:,} tokens"
    )
    return EpochPlan(
        split,
        data.tokens,
        config.batch,
        max_sample_tokens=config.data.max_sample_tokens,
        seed=config.optim.seed,
        fingerprint=data.fingerprint,
    )


def make_parts(
    config: TrainConfig,
    data: Samples,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attention: Literal["plain", "flex"],
    main_first: Callable[[Callable[[], VocabMap]], VocabMap],
    say: Say,
) -> Parts:
    """`main_first` runs a function on rank 0 before the others, so that the map is counted once."""
    plan = make_plan(config, data, say)
    model = config.target.model or data.capture.model
    folder = resolve_checkpoint(model, revision=config.target.revision)
    info = read_target_info(folder, model=model)
    spec = draft_spec(config.draft, info, data.capture)
    longest = int(data.tokens[plan.split.train].max())
    spec = spec.trained_to(min(longest, config.data.max_sample_tokens))
    warm = read_warm(config, info)
    if warm is not None:
        spec = warm.adapted(spec, say)
    keep = warm.tensors.get("d2t") if warm is not None and config.draft.init_vocab == "keep" else None
    vocab = main_first(
        lambda: make_vocab(
            config,
            data,
            plan.split,
            size=spec.draft_vocab_size,
            vocab_size=info.vocab_size,
            target=folder,
            say=say,
            keep=keep,
        )
    )
    say(vocab.report())
    say(f"reading embedding and head of {info.model} ({info.architecture or 'unknown architecture'})")
    weights = read_target_weights(folder, info)
    draft = make_draft(config, spec, weights, vocab, dtype=dtype)
    if warm is not None:
        warm.load(draft, vocab, new_map=config.draft.init_vocab == "data")
    head = draft.embed_tokens if weights.head is weights.embed else weights.head.to(dtype)
    teacher = TopKTeacher(info, vocab.kept) if data.capture.top_k else Teacher(head, info, vocab.kept)
    trained = sum(p.numel() for p in draft.parameters())
    say(f"draft: {trained / 1e6:,.1f} M trained parameters, aux layers {list(spec.aux_layers)}, attention {attention}")
    return Parts(spec, info, vocab, TttModel(draft, teacher, config.ttt, config.loss, attention).to(device), plan)


def make_draft(
    config: TrainConfig, spec: DraftSpec, weights: TargetWeights, vocab: VocabMap, *, dtype: torch.dtype
) -> Eagle3Draft:
    """The same initial weights on every rank: they come from the seed alone."""
    draft = Eagle3Draft(spec, weights.embed.to(dtype))
    generator = torch.Generator().manual_seed(config.optim.seed)
    rows = weights.head[vocab.kept].float() if config.draft.head_init == "target" else None
    draft.initialise(generator, head_rows=rows, identity_fc=config.draft.fc_init == "identity")
    return draft
