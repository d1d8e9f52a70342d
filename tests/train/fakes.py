"""A data set in memory with the interface of `ShardSet`, filled by running a real (tiny) target in transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from eagle3_data.capture import Alignment, CaptureSpec
from eagle3_data.protocol import AUX, IDS, LAST, MASK


@dataclass
class MemorySamples:
    capture: CaptureSpec
    samples: list[dict[str, Tensor]]
    fingerprint: str = "memory"
    alignment: Alignment = "strict"
    reads: dict[str, int] = field(default_factory=dict)
    """Column -> times it was read, to show what training touches."""

    def __post_init__(self) -> None:
        self.tokens = np.array([len(sample[IDS]) for sample in self.samples], dtype=np.int32)

    @property
    def keys(self) -> list[str]:
        return [f"sample{i:06d}" for i in range(len(self.samples))]

    def expect(self, samples: Sequence[int]) -> None:
        pass

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, i: int, columns: Sequence[str] | None = None) -> dict[str, Tensor]:
        names = tuple(self.samples[i]) if columns is None else columns
        for name in names:
            self.reads[name] = self.reads.get(name, 0) + 1
        return {name: self.samples[i][name] for name in names}

    def read_into(self, i: int, out: Mapping[str, Tensor]) -> None:
        for name, tensor in self.read(i, tuple(out)).items():
            out[name].copy_(tensor[: len(out[name])])


def random_samples(
    lengths: Sequence[int], *, width: int, vocab: int, layers: tuple[int, ...] = (1, 2, 4), seed: int = 0
) -> MemorySamples:
    """Random states, float32; the answer is the second half of each sample."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths:
        mask = torch.zeros(length, dtype=torch.uint8)
        mask[length // 2 :] = 1
        samples.append(
            {
                IDS: torch.randint(0, vocab, (length,), generator=generator, dtype=torch.int32),
                MASK: mask,
                AUX: torch.randn(length, width * len(layers), generator=generator),
                LAST: torch.randn(length, width, generator=generator),
            }
        )
    capture = CaptureSpec(model="random", layers=layers, width=width, dtype="float32", vocab_size=vocab)
    return MemorySamples(capture, samples)


@torch.no_grad()
def target_samples(
    model_folder: str, prompts: Sequence[Sequence[int]], *, answer_tokens: int, layers: tuple[int, ...]
) -> MemorySamples:
    """Greedy answers of the target and its own states, as the server would capture them (float32).

    The prompts have one length.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    # prompts of one length go through the model together
    ids = torch.tensor([list(prompt) for prompt in prompts])
    ids = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=answer_tokens,
        min_new_tokens=answer_tokens,
        do_sample=False,
    )
    out = model(ids, output_hidden_states=True)
    mask = torch.zeros(ids.shape[1], dtype=torch.uint8)
    mask[ids.shape[1] - answer_tokens :] = 1
    samples = [
        {
            IDS: ids[i].to(torch.int32),
            MASK: mask.clone(),
            AUX: torch.cat([out.hidden_states[layer + 1][i] for layer in layers], dim=-1),
            LAST: out.hidden_states[-1][i].clone(),
        }
        for i in range(len(prompts))
    ]
    config = model.config
    capture = CaptureSpec(
        model=model_folder, layers=layers, width=config.hidden_size, dtype="float32", vocab_size=config.vocab_size
    )
    return MemorySamples(capture, samples)
