"""Models from transformers with random weights, of a size that fits the machine; for scripts/gpu_check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

__all__ = ["KINDS", "Size", "batch_of", "model_of"]

KINDS = ("gpt2", "llama")


@dataclass(frozen=True)
class Size:
    """Of a model and its batch."""

    width: int
    layers: int
    sequence: int
    batch: int
    vocabulary: int
    head: int = 64

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.batch * self.sequence

    @property
    def largest_activation(self) -> int:
        """Bytes, in bfloat16: between the two halves of the feed-forward layer."""
        return self.tokens * 4 * self.width * 2

    @classmethod
    def of_width(cls, width: int) -> Size:
        """The one dial. A layer computes `width` times as much as it saves, so wide ones hide more of a copy."""
        sequence = min(1024, width // 2)
        return cls(width, 4, sequence, width // 2 // sequence, vocabulary=8192, head=min(128, width))

    @property
    def needed(self) -> int:
        """Bytes of memory, about: what is saved, and weights and gradients or the weights in float32."""
        return self.layers * (80 * self.tokens * self.width + 12 * self.width**2 * 4)

    @classmethod
    def that_fits(cls, *, device: int, host: int, disk: int) -> Size:
        """The widest that leaves room; what is saved also lies in host memory, pinned, and on disk."""
        width = 8192
        while width > 256 and cls.of_width(width).needed > min(device // 2, host // 3, disk // 2):
            width //= 2
        return cls.of_width(width)


def model_of(kind: str, size: Size, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """With random weights, in training mode."""
    common: dict[str, Any] = {
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_implementation": "sdpa",
    }
    common |= {"vocab_size": size.vocabulary}
    heads = max(1, size.width // size.head)
    with torch.device(device):
        if kind == "gpt2":
            config = transformers.GPT2Config(
                n_embd=size.width, n_layer=size.layers, n_head=heads, n_positions=size.sequence, **common
            )
            model: nn.Module = transformers.GPT2LMHeadModel(config)
        else:
            llama = transformers.LlamaConfig(
                hidden_size=size.width,
                intermediate_size=size.width * 11 // 4,
                num_hidden_layers=size.layers,
                num_attention_heads=heads,
                num_key_value_heads=heads,
                max_position_embeddings=size.sequence,
                **common,
            )
            model = transformers.LlamaForCausalLM(llama)
    return model.to(device, dtype).train()


def batch_of(size: Size, device: torch.device, seed: int) -> Tensor:
    """Token numbers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size.batch, size.sequence)
    return torch.randint(size.vocabulary, shape, generator=generator).to(device)
