"""The EAGLE-3 draft for training (arXiv 2503.01840; the layout that SGLang's LlamaForCausalLMEagle3 loads).

    e = embed(x)                                       frozen copy of the target's embedding
    h = fc(concat(aux states))                         step 0; later steps take the draft's own output
    r = h + attention(concat(input_layernorm(e), hidden_norm(h)))
    s = r + swiglu(post_attention_layernorm(r))
    logits over the draft vocabulary = lm_head(norm(s));  the next step takes s, or norm(s) with norm_output

Parameter names are the export's. Shapes: M rows of a step (N of the batch at step 0, the R trained ones later), H
hidden width, L aux states, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eagle3_data.train.attention import StepZeroAttention, TttCache
from eagle3_data.train.fused import fused
from eagle3_data.train.rope import cos_sin, inverse_frequencies, rotate
from eagle3_data.train.spec import DraftSpec

INIT_STD = 0.02


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32; returns the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention whose input is twice as wide as its output."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.width = spec.head_dim
        self.q_proj = nn.Linear(2 * spec.hidden_size, spec.num_attention_heads * self.width, bias=False)
        self.k_proj = nn.Linear(2 * spec.hidden_size, spec.num_key_value_heads * self.width, bias=False)
        self.v_proj = nn.Linear(2 * spec.hidden_size, spec.num_key_value_heads * self.width, bias=False)
        self.o_proj = nn.Linear(spec.num_attention_heads * self.width, spec.hidden_size, bias=False)

    def project(self, both_ME: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [heads, M, D], keys and values [kv_heads, M, D]."""
        q, k = (rotate(self._heads(proj(both_ME)), cos, sin) for proj in (self.q_proj, self.k_proj))
        return q, k, self._heads(self.v_proj(both_ME))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.width).transpose(0, 1)


class SwiGLU(nn.Module):
    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x_RH: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x_RH)) * self.up_proj(x_RH))
        return out


class MidLayer(nn.Module):
    """The draft's one decoder layer; the residual is the un-normed state."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = SwiGLU(spec)

    def before(self, embeds_MH: Tensor, hidden_MH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `Attention.project`."""
        both = torch.cat([self.input_layernorm(embeds_MH), self.hidden_norm(hidden_MH)], dim=-1)  # [M, 2H]
        return self.self_attn.project(both, cos, sin)

    def after(self, mixed_HRD: Tensor, hidden_RH: Tensor) -> Tensor:
        """The layer's output [R, H] from the attention's and the rows' hidden states."""
        residual = self.self_attn.o_proj(mixed_HRD.transpose(0, 1).flatten(1)) + hidden_RH  # [R, H]
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))  # [R, H]
        return out


class Eagle3Draft(nn.Module):
    """Trainable parameters under their export names; the frozen embedding is a buffer outside the state dict."""

    d2t: Tensor
    t2d: Tensor
    embed_tokens: Tensor
    frequencies: Tensor

    def __init__(self, spec: DraftSpec, embed_VH: Tensor) -> None:
        super().__init__()
        self.spec = spec
        self.input_norm = RMSNorm(spec.aux_width, spec.rms_norm_eps) if spec.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList([RMSNorm(spec.hidden_size, spec.rms_norm_eps) for _ in spec.aux_layers])
            if spec.fc_norm
            else None
        )
        self.fc = nn.Linear(spec.aux_width, spec.hidden_size, bias=False)
        self.midlayer = MidLayer(spec)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)
        frequencies, self.magnitude = inverse_frequencies(spec.rope, spec.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("embed_tokens", embed_VH, persistent=False)

    def initialise(self, generator: torch.Generator, *, head_rows: Tensor | None, identity_fc: bool) -> None:
        """Normal noise of std 0.02, then optionally the target's head rows [V_draft, H] and a pass-through `fc`.

        With the pass-through the draft starts on the target's own scale and basis instead of on noise.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, INIT_STD, generator=generator)
                    if identity_fc and name.endswith(("o_proj.weight", "down_proj.weight")):
                        parameter.mul_(0.1)  # the branches start small beside the state that is passed through
            if head_rows is not None:
                self.lm_head.weight.copy_(head_rows)
            if identity_fc:
                width = self.spec.hidden_size
                self.fc.weight.mul_(0.1)
                self.fc.weight[:, -width:] += torch.eye(width)

    def project(self, aux_NA: Tensor) -> Tensor:
        """Aux states [N, L*H] to the draft's first hidden state [N, H]."""
        return _project(aux_NA, self)

    def step(
        self,
        tokens_M: Tensor,
        hidden_MH: Tensor,
        positions_M: Tensor,
        cache: TttCache,
        step_zero: StepZeroAttention,
        active_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One draft step on M rows: (normed state for the head, state for the next step), both [R, H].

        `active_R` picks the rows to go on with; the others only lend their keys and values. None: all rows.
        """
        q, k, v = _before_attention(tokens_M, hidden_MH, positions_M, self)
        hidden = hidden_MH
        if active_R is not None:
            q, hidden = q[:, active_R], hidden[active_R]
        state, normed = _after_attention(cache.attend(q, k, v, step_zero), hidden, self)
        return normed, normed if self.spec.norm_output else state


@fused
def _project(aux_NA: Tensor, draft: Eagle3Draft) -> Tensor:
    if draft.input_norm is not None:
        aux_NA = draft.input_norm(aux_NA)
    if draft.fc_norm is not None:
        chunks = aux_NA.chunk(len(draft.fc_norm), dim=-1)
        aux_NA = torch.cat([norm(chunk) for norm, chunk in zip(draft.fc_norm, chunks, strict=True)], dim=-1)
    out: Tensor = draft.fc(aux_NA)
    return out


@fused
def _before_attention(
    tokens_M: Tensor, hidden_MH: Tensor, positions_M: Tensor, draft: Eagle3Draft
) -> tuple[Tensor, Tensor, Tensor]:
    embeds = nn.functional.embedding(tokens_M, draft.embed_tokens).to(hidden_MH.dtype)  # [M, H]
    cos, sin = cos_sin(positions_M, draft.frequencies, draft.magnitude)  # [M, D/2] each
    return draft.midlayer.before(embeds, hidden_MH, cos, sin)


@fused
def _after_attention(mixed_HRD: Tensor, hidden_RH: Tensor, draft: Eagle3Draft) -> tuple[Tensor, Tensor]:
    """(state, normed state), both [R, H]."""
    state = draft.midlayer.after(mixed_HRD, hidden_RH)
    return state, draft.norm(state)
