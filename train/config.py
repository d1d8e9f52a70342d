"""Settings of a training run: one typed YAML file, every field documented, unknown fields refused.

`accelerate launch -m eagle3_data.train --print-config` prints the whole schema with its defaults as YAML.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3_data.capture import Alignment
from eagle3_data.errors import ConfigError

LossKind = Literal["ce", "kl", "lk_alpha", "lk_lambda"]
Tracker = Literal["tensorboard", "wandb"]
Denominator = Literal["tokens", "valid", "batch"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class DataConfig(_Section):
    folder: Path
    """A finished (or growing) build: the folder that `eagle3-data build` wrote or `pull` fetched."""
    shard_cache: Path | None = None
    """Keep shards of a mirror in this folder; None: $EAGLE3_DATA_SHARD_CACHE, else samples are read by ranges."""
    shard_cache_size: str | None = None
    """At most so much there, for example 500GB; the shard whose last use is oldest goes first. None: 100GB."""
    max_sample_tokens: int = Field(default=4096, ge=4)
    """Longer samples are cut to this many tokens; how many were cut is printed and logged."""
    holdout_share: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of the samples kept out of training and used for evaluation, chosen by a hash of the key."""
    holdout_max_samples: int = Field(default=256, ge=0)
    """Upper limit of the held-out share, so that an evaluation stays short on a large data set."""


class TargetConfig(_Section):
    model: str | None = None
    """Folder or hub id of the target; only its embedding, head and config.json are read. None: the data's."""
    revision: str | None = None
    """Hub revision; ignored for a folder."""


class DraftConfig(_Section):
    vocab_size: int | None = Field(default=32000, ge=1)
    """Tokens the draft can propose. None, or at least the target's: the whole vocabulary."""
    num_attention_heads: int | None = Field(default=None, ge=1)
    """None: the target's."""
    num_key_value_heads: int | None = Field(default=None, ge=1)
    """None: the target's; 8 at most for targets with latent attention (MLA)."""
    head_dim: int | None = Field(default=None, ge=2)
    """None: the target's; 128 for targets with latent attention (MLA)."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the SwiGLU. None: the target's (dense) one."""
    norm_before_fc: bool = False
    """One RMSNorm over the concatenated aux states before `fc`."""
    fc_norm: bool = False
    """One RMSNorm per aux state before `fc` (EAGLE-3.1). Not together with `norm_before_fc`."""
    norm_output: bool = False
    """Feed the normed state to the next step (EAGLE-3.1) instead of the residual stream."""
    sliding_window_tokens: int | None = Field(default=None, ge=8)
    """Attend to this many latest positions only; serve with SGLang's --speculative-draft-window-size. None: all."""
    head_init: Literal["target", "random"] = "target"
    """Start `lm_head` from the target's rows of the draft vocabulary, or from noise (EAGLE, SpecForge, TorchSpec)."""
    fc_init: Literal["identity", "random"] = "identity"
    """Start `fc` as the last aux state passed through unchanged, or from noise (all rivals)."""
    init_from: Path | None = None
    """Warm start from a checkpoint or an export of either engine."""
    init_vocab: Literal["keep", "data"] = "keep"
    """Warm start: 'keep' its vocabulary map, or make one from this 'data': `lm_head` rows of tokens that both have are
    kept, the others start as `head_init` says."""

    @model_validator(mode="after")
    def _one_norm(self) -> DraftConfig:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        return self


class TttConfig(_Section):
    """Training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): the draft runs on its own output."""

    steps: int = Field(default=7, ge=1, le=16)
    """Draft steps unrolled in training; serve with at most this many."""
    decay: float = Field(default=0.8, gt=0.0, le=1.0)
    """Weight of step i is decay**i."""
    alignment: Alignment | None = None
    """Positions that are trained: 'strict' those that serving meets, 'input' speculators', 'legacy' EAGLE's. None: what
    the data's manifest records ('strict' unless its maker chose another)."""


class LossConfig(_Section):
    kind: LossKind = "ce"
    """'ce' soft cross-entropy over the draft vocabulary; 'kl'; 'lk_alpha' -log of the acceptance rate; 'lk_lambda' a
    mix of 'ce' and the acceptance rate."""
    denominator: Denominator = "tokens"
    """'tokens': global mean over supervised positions of all ranks and micro-batches; 'valid' (TorchSpec) and 'batch'
    (EAGLE, SpecForge: batch x length) are local to a micro-batch."""
    out_of_vocab: Literal["drop", "keep"] = "drop"
    """Positions whose target top-1 is outside the draft vocabulary: 'drop' (EAGLE, SpecForge, TorchSpec) or 'keep'."""
    lk_scale: float = Field(default=1.0, ge=0.0, le=1.0)
    """lk_lambda: weight of the cross-entropy is lk_scale * exp(-lk_decay * acceptance)."""
    lk_decay: float = Field(default=3.0, ge=0.0)
    """See lk_scale."""
    chunk_bytes: int | None = Field(default=None, ge=1 << 16)
    """Logits held at once; the loss works through the positions in chunks of this size. None: 2 GiB on a GPU, 256 MiB
    on a CPU."""


class BatchConfig(_Section):
    micro_batch_tokens: int = Field(default=8192, ge=16)
    """Tokens (with padding) of one forward pass on one device."""
    batches_per_step: int = Field(default=8, ge=1)
    """Micro-batches of one optimizer step, all devices together; the curve does not depend on the number of devices."""
    packing: bool = False
    """Several samples in one row, kept apart by a document mask; False: one per row, similar lengths together."""
    bucket_samples: int = Field(default=4096, ge=1)
    """Samples are shuffled, then sorted by length inside windows of this many."""
    pad_multiple: int = Field(default=8, ge=1)
    """Row lengths are rounded up to this; 128 suits flex attention."""
    prefetch_batches: int = Field(default=3, ge=1)
    """Micro-batches read ahead; each holds one reused (on GPU: pinned) buffer."""
    reader_threads: int = Field(default=2, ge=1)
    """Threads that copy samples out of the page cache."""


class OptimConfig(_Section):
    lr: float = Field(default=1e-4, gt=0.0)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moments."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled; not on norms."""
    clip_norm: float = Field(default=0.5, gt=0.0)
    """Gradient norm is clipped to this (0.5 in EAGLE and SpecForge)."""
    warmup_share: float = Field(default=0.015, ge=0.0, lt=1.0)
    """Share of the run with a linearly rising rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """After the warm-up, down to `final_lr_share`."""
    final_lr_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Rate at the end, as a share of `lr`."""
    epochs: int = Field(default=10, ge=1)
    """Passes over the training share."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many optimizer steps."""
    max_minutes: float | None = Field(default=None, gt=0.0)
    """Stop after this much training time; the schedule then follows the clock where that is ahead of the steps."""
    seed: int = 0
    """Of the initial weights, the held-out share and the order of samples."""


class RunConfig(_Section):
    output: Path
    """Run folder: config, vocabulary map, metrics.jsonl, checkpoints/, best/."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """'bf16' computes in bfloat16 with float32 master weights; 'auto': bf16 on GPU, fp32 on CPU."""
    attention: Literal["auto", "plain", "flex"] = "auto"
    """'auto': flex attention on GPU, plain on CPU; both give the same result."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads on CPU. None: torch's own choice."""
    checkpoint_every_steps: int = Field(default=500, ge=1)
    """Optimizer steps between checkpoints; one is also written at the end and on Ctrl-C or SIGTERM."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Older ones are removed; the best one is kept apart in best/."""
    eval_every_steps: int = Field(default=500, ge=1)
    """Optimizer steps between evaluations on the held-out share; one is also made at the end."""
    early_stop_evals: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations without a better simulated acceptance length. None: never."""
    simulate_draft_tokens: int = Field(default=3, ge=1)
    """Draft tokens per verification in the simulated acceptance length; use what the server will use."""
    log_every_s: float = Field(default=10.0, ge=0.0)
    """Seconds between progress lines."""
    max_skipped_steps: int = Field(default=10, ge=0)
    """Steps in a row with a non-finite gradient that are skipped before the run is stopped."""
    trackers: tuple[Tracker, ...] | None = None
    """'tensorboard', 'wandb' (one that is not installed is an error), next to metrics.jsonl, which is always written.
    None: TensorBoard where it is installed."""
    resume: bool = True
    """Go on from the newest checkpoint in `output` if there is one."""


class TrainConfig(_Section):
    data: DataConfig
    target: TargetConfig = TargetConfig()
    draft: DraftConfig = DraftConfig()
    ttt: TttConfig = TttConfig()
    loss: LossConfig = LossConfig()
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    run: RunConfig

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if self.data.max_sample_tokens > self.batch.micro_batch_tokens:
            raise ValueError(
                f"data.max_sample_tokens ({self.data.max_sample_tokens}) must not exceed "
                f"batch.micro_batch_tokens ({self.batch.micro_batch_tokens})"
            )
        if self.run.simulate_draft_tokens > self.ttt.steps:
            wanted, steps = self.run.simulate_draft_tokens, self.ttt.steps
            raise ValueError(f"run.simulate_draft_tokens ({wanted}) must not exceed ttt.steps ({steps})")
        return self


def parse_config(values: dict[str, Any], *, source: str) -> TrainConfig:
    """Raises ConfigError naming the field, what was found and what is allowed."""
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ConfigError(
            f"{source}: {where}: {first['msg']}, got {first.get('input')!r}{more}",
            next="python -m eagle3_data.train --print-config shows every field",
        ) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of one YAML file, not yet checked. Raises ConfigError when it is missing or not of that form."""
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(section, dict) for section in values.values()):
        raise ConfigError(f"{path} must hold a mapping of sections (data, run, ...), each with its fields")
    return values


def load_config(path: Path) -> TrainConfig:
    """Read one YAML file. Raises ConfigError when it is missing, not YAML, or has a wrong or unknown field."""
    return parse_config(read_yaml(path), source=str(path))


def override(values: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Apply `section.field=value` (value read as YAML) to a nested mapping; returns a new one."""
    result: dict[str, Any] = {name: dict(section) for name, section in values.items()}
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        section, dot, field = key.partition(".")
        if not separator or not dot:
            raise ConfigError(f"{assignment!r} is not of the form section.field=value")
        result.setdefault(section, {})[field] = yaml.safe_load(text)
    return result


def to_yaml(config: TrainConfig) -> str:
    """The whole configuration as YAML, each field after its documentation; reads back to an equal one."""
    lines: list[str] = []
    for section_name in type(config).model_fields:
        section = getattr(config, section_name)
        lines.append(f"{section_name}:")
        dumped = section.model_dump(mode="json")
        for name, info in type(section).model_fields.items():
            lines += [f"  # {line.strip()}" for line in (info.description or "").splitlines()]
            value = yaml.safe_dump(dumped[name], default_flow_style=True, width=1000)
            value = value.removesuffix("\n...\n").strip()  # YAML's end mark after a bare scalar
            lines.append(f"  {name}: {value}")
    return "\n".join(lines) + "\n"
