"""A draft decoded token by token with a growing cache, written without the product's attention or TTT code.

For every row t it does what a server does: rows 0..t enter the cache with true states, then the draft runs on its own
output for `steps` steps with the recorded tokens. One document at a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eagle3_data.train.draft import Eagle3Draft
from eagle3_data.train.rope import inverse_frequencies


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class _Decoder:
    def __init__(self, draft: Eagle3Draft) -> None:
        self.draft, self.spec = draft, draft.spec
        self.frequencies, self.magnitude = inverse_frequencies(self.spec.rope, self.spec.head_dim)

    def start(self, aux: Tensor) -> Tensor:
        draft, spec = self.draft, self.spec
        if spec.norm_before_fc:
            assert draft.input_norm is not None
            aux = _rms(aux, draft.input_norm.weight, spec.rms_norm_eps)
        if spec.fc_norm:
            assert draft.fc_norm is not None
            parts = aux.split(spec.hidden_size)
            aux = torch.cat([_rms(p, n.weight, spec.rms_norm_eps) for p, n in zip(parts, draft.fc_norm, strict=True)])
        return draft.fc.weight @ aux

    def _turn(self, x: Tensor, position: int) -> Tensor:
        """x: [heads, D]"""
        angle = position * self.frequencies
        cos, sin = angle.cos() * self.magnitude, angle.sin() * self.magnitude
        half = x.shape[-1] // 2
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def token(
        self, token: int, hidden: Tensor, position: int, cache: list[tuple[int, Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """One decoded token; appends to the cache. Returns (normed state, state for the next step)."""
        spec, layer = self.spec, self.draft.midlayer
        emb = _rms(self.draft.embed_tokens[token], layer.input_layernorm.weight, spec.rms_norm_eps)
        both = torch.cat([emb, _rms(hidden, layer.hidden_norm.weight, spec.rms_norm_eps)])
        attention = layer.self_attn
        q = self._turn((attention.q_proj.weight @ both).view(-1, spec.head_dim), position)
        k = self._turn((attention.k_proj.weight @ both).view(-1, spec.head_dim), position)
        v = (attention.v_proj.weight @ both).view(-1, spec.head_dim)
        cache.append((position, k, v))
        window = spec.sliding_window_tokens
        seen = [(k, v) for p, k, v in cache if window is None or p > position - window]
        groups = spec.num_attention_heads // spec.num_key_value_heads
        heads = []
        for head in range(spec.num_attention_heads):
            keys = torch.stack([k[head // groups] for k, _ in seen])
            values = torch.stack([v[head // groups] for _, v in seen])
            heads.append(((keys @ q[head]) / math.sqrt(spec.head_dim)).softmax(0) @ values)
        state = hidden + attention.o_proj.weight @ torch.cat(heads)
        inner = _rms(state, layer.post_attention_layernorm.weight, spec.rms_norm_eps)
        gate = torch.nn.functional.silu(layer.mlp.gate_proj.weight @ inner)
        state = state + layer.mlp.down_proj.weight @ (gate * (layer.mlp.up_proj.weight @ inner))
        normed = _rms(state, self.draft.norm.weight, spec.rms_norm_eps)
        return normed, normed if spec.norm_output else state


@torch.no_grad()
def decoded_states(draft: Eagle3Draft, ids: Tensor, aux: Tensor, steps: int) -> Tensor:
    """Normed states [S, T, H] of one document; NaN where row t at step i has no input token."""
    length = len(ids)
    decoder = _Decoder(draft)
    out = torch.full((steps, length, draft.spec.hidden_size), float("nan"))
    prefix: list[tuple[int, Tensor, Tensor]] = []
    for row in range(length - 1):
        cache = list(prefix)
        normed, state = decoder.token(int(ids[row + 1]), decoder.start(aux[row]), row, cache)
        prefix = list(cache)  # true states stay, the draft's own are thrown away after verification
        out[0, row] = normed
        for step in range(1, steps):
            if row + 1 + step >= length:
                break
            normed, state = decoder.token(int(ids[row + 1 + step]), state, row + step, cache)
            out[step, row] = normed
    return out


def make_draft(seed: int = 0, **changes: object) -> Eagle3Draft:
    """A small random draft: 48 wide, 4 heads over 2 key heads, 96 target tokens, 40 draft tokens."""
    from eagle3_data.train.rope import RopeSpec
    from eagle3_data.train.spec import DraftSpec

    fields: dict[str, object] = {
        "target_model": "random",
        "target_architecture": "LlamaForCausalLM",
        "target_layers": 8,
        "hidden_size": 48,
        "aux_layers": (1, 3, 4),
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "draft_vocab_size": 40,
        "rms_norm_eps": 1e-6,
        "max_positions": 4096,
        "rope": RopeSpec(),
    }
    spec = DraftSpec(**{**fields, **changes})  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    draft = Eagle3Draft(spec, torch.randn(spec.vocab_size, spec.hidden_size, generator=generator))
    draft.initialise(generator, head_rows=None, identity_fc=False)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            # larger than the usual start, so that attention and norms matter in a comparison
            parameter.mul_(8) if parameter.ndim == 2 else parameter.uniform_(0.5, 1.5, generator=generator)
            assert name
    return draft
