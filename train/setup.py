"""From settings to the objects of a run: target, vocabulary map, draft, plan. Each phase prints a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_data.checkpoint import resolve_checkpoint
from eagle3_data.errors import ConfigError, TrainingError
from eagle3_data.protocol import IDS, MASK
from eagle3_data.train import vocab as vocab_maps
from eagle3_data.train.checkpoint import DRAFT
from eagle3_data.train.config import TrainConfig
from eagle3_data.train.draft import Eagle3Draft
from eagle3_data.train.loader import Samples
from eagle3_data.train.plan import EpochPlan, Split, split_samples
from eagle3_data.train.spec import DraftSpec, draft_spec
from eagle3_data.train.target import (
    TargetInfo,
    TargetWeights,
    read_target_info,
    read_target_weights,
)
from eagle3_data.train.teacher import Teacher, TopKTeacher
from eagle3_data.train.ttt import TttModel

Say = Callable[[str], None]
COUNT_REPORT_EVERY = 5000
SCRIPTS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a run is made of."""

    spec: DraftSpec
    info: TargetInfo
    vocab: vocab_maps.VocabMap
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


def make_vocab(
    config: TrainConfig, data: Samples, split: Split, *, size: int, vocab_size: int, target: Path | None, say: Say
) -> vocab_maps.VocabMap:
    """The stored map of exactly this data and size, or a new one; only ids and loss masks are read.

    `target`: the checkpoint whose tokenizer.json gives the texts for the report by writing system.
    """
    if size >= vocab_size:
        return vocab_maps.map_from_d2t(torch.zeros(vocab_size, dtype=torch.int64), vocab_size)
    folder = config.run.output / "vocab"
    key = vocab_maps.map_key(fingerprint=data.fingerprint, samples=split.key, size=size, vocab_size=vocab_size)
    found = vocab_maps.load_map(folder, key)
    if found is None:
        say("counting supervised tokens for the draft vocabulary")
        counts = vocab_maps.count_tokens(_supervised(data, split, say), vocab_size)
        found = vocab_maps.build_map(counts, size)
        pieces = token_pieces(target) if target is not None else {}
        for row in vocab_maps.coverage_by_script(counts, found, pieces)[:SCRIPTS_SHOWN] if pieces else []:
            say(f"  {row.script.lower()}: {row.coverage:.2%} of {row.tokens:,} tokens")
        vocab_maps.save_map(found, folder, key)
    return found


def token_pieces(folder: Path) -> dict[int, str]:
    """Decoded text of every token, out of the checkpoint's tokenizer.json alone; empty when there is none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return {}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return {number: tokenizer.decode([number]) for number in range(tokenizer.get_vocab_size())}


def _supervised(data: Samples, split: Split, say: Say) -> Iterator[tuple[Tensor, Tensor]]:
    for number, sample in enumerate(split.train.tolist(), start=1):
        read = data.read(sample, (IDS, MASK))
        yield read[IDS], read[MASK]
        if number % COUNT_REPORT_EVERY == 0:
            say(f"  counted {number:,} of {len(split.train):,} samples")


def make_parts(
    config: TrainConfig,
    data: Samples,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attention: Literal["plain", "flex"],
    main_first: Callable[[Callable[[], vocab_maps.VocabMap]], vocab_maps.VocabMap],
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
    warm = _warm_start(config.draft.init_from)
    if warm is not None and "d2t" in warm:
        vocab = vocab_maps.map_from_d2t(warm["d2t"], info.vocab_size)
        if vocab.size != spec.draft_vocab_size:
            raise ConfigError(
                f"draft.init_from has a draft vocabulary of {vocab.size}, draft.vocab_size is {spec.draft_vocab_size}",
                next=f"set draft.vocab_size to {vocab.size}",
            )
    else:
        vocab = main_first(
            lambda: make_vocab(
                config,
                data,
                plan.split,
                size=spec.draft_vocab_size,
                vocab_size=info.vocab_size,
                target=folder,
                say=say,
            )
        )
    say(vocab.report())
    say(f"reading embedding and head of {info.model} ({info.architecture or 'unknown architecture'})")
    weights = read_target_weights(folder, info)
    draft = make_draft(config, spec, weights, vocab, dtype=dtype)
    if warm is not None:
        missing = [name for name, p in draft.named_parameters() if name not in warm or warm[name].shape != p.shape]
        if missing:
            raise TrainingError(f"draft.init_from {config.draft.init_from} does not fit: {missing[0]}")
        draft.load_state_dict({name: warm[name] for name, _ in draft.named_parameters()}, strict=False)
    head = draft.embed_tokens if weights.head is weights.embed else weights.head.to(dtype)
    teacher = TopKTeacher(info, vocab.kept) if data.capture.top_k else Teacher(head, info, vocab.kept)
    trained = sum(p.numel() for p in draft.parameters())
    say(f"draft: {trained / 1e6:,.1f} M trained parameters, aux layers {list(spec.aux_layers)}, attention {attention}")
    return Parts(spec, info, vocab, TttModel(draft, teacher, config.ttt, config.loss, attention).to(device), plan)


def make_draft(
    config: TrainConfig, spec: DraftSpec, weights: TargetWeights, vocab: vocab_maps.VocabMap, *, dtype: torch.dtype
) -> Eagle3Draft:
    """The same initial weights on every rank: they come from the seed alone."""
    draft = Eagle3Draft(spec, weights.embed.to(dtype))
    generator = torch.Generator().manual_seed(config.optim.seed)
    rows = weights.head[vocab.kept].float() if config.draft.head_init == "target" else None
    draft.initialise(generator, head_rows=rows, identity_fc=config.draft.fc_init == "identity")
    return draft


def _warm_start(path: Path | None) -> dict[str, torch.Tensor] | None:
    if path is None:
        return None
    for name in (DRAFT, "model.safetensors"):
        if (path / name).exists():
            tensors = load_file(path / name)
            # speculators and vLLM call the layer by its number, everybody else `midlayer`
            return {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
    raise ConfigError(f"draft.init_from: {path} has neither {DRAFT} nor model.safetensors")
