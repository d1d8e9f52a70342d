"""What a loaded scheduler says of itself. SGLang moved these between 0.5.14 and 0.5.23; only this file knows where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def server_args(scheduler_or_args: Any) -> Mapping[str, Any]:
    """Server arguments by name: as resolved where SGLang keeps that apart (0.5.23), else as parsed."""
    args = getattr(scheduler_or_args, "server_args", scheduler_or_args)
    try:
        from sglang.srt.runtime_context import get_context

        return dict(get_context().resolved_server_args_dict())
    except (ImportError, AttributeError, LookupError, RuntimeError):
        return dict(vars(args))


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerFacts:
    """One scheduler process, as capture needs it."""

    args: Mapping[str, Any]
    model_path: str
    num_layers: int
    width: int
    vocab_size: int
    dtype: str
    """Of the model's activations, without `torch.`."""
    context_length: int
    """Longest prompt taken, in tokens."""
    chunk_tokens: int
    """-1 when chunked prefill is off."""
    radix_cache: bool
    attn_tp_rank: int
    tp_size: int
    dp_size: int
    device: str
    speculative: bool
    """A draft is really loaded."""

    @classmethod
    def of(cls, scheduler: Any) -> SchedulerFacts:
        args, config = server_args(scheduler), scheduler.model_config
        return cls(
            args=args,
            model_path=str(args["model_path"]),
            num_layers=num_layers(config),
            width=int(config.hidden_size),
            vocab_size=int(config.vocab_size),
            dtype=str(config.dtype).removeprefix("torch."),
            context_length=int(scheduler.max_req_input_len) - 1,  # SGLang rejects lengths >= max_req_input_len
            chunk_tokens=int(scheduler.chunked_prefill_size or -1),
            radix_cache=not scheduler.disable_radix_cache,
            attn_tp_rank=_attn_tp_rank(scheduler),
            tp_size=int(args.get("tp_size") or 1),
            dp_size=data_parallel_ranks(args),
            device=str(args.get("device") or "cuda"),
            speculative=not scheduler.spec_algorithm.is_none(),
        )


def data_parallel_ranks(args: Mapping[str, Any]) -> int:
    """Replicas, or ranks with attention of their own: `attn_dp_size` in SGLang 0.5.23, whose `dp_size` is then 1."""
    return max(int(args.get(name) or 1) for name in ("dp_size", "attn_dp_size"))


def num_layers(model_config: Any) -> int:
    """Decoder layers of the language model (a wrapper's text config where there is one)."""
    return int(model_config.hf_text_config.num_hidden_layers)


def _attn_tp_rank(scheduler: Any) -> int:
    try:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().attn_tp_rank)
    except (ImportError, AttributeError):
        state = getattr(scheduler, "ps", scheduler)
        return int(state.attn_tp_rank)
