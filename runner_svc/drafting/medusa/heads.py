"""Medusa's heads: residual blocks over the model's final state, then a head of logits.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads". Head 0 reads the
state from which the model draws a token, and guesses the token behind it; each further head guesses one further.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A residual block: x + SiLU(weight x + bias)."""

    weight: Tensor  # [hidden_size, hidden_size]
    bias: Tensor  # [hidden_size]

    def __call__(self, states: Tensor) -> Tensor:
        """Returns the block's output for `states` [L, hidden_size], of the same shape."""
        return states + functional.silu(functional.linear(states, self.weight, self.bias))


@dataclass(frozen=True, slots=True, eq=False)
class MedusaHead:
    """The head of one distance."""

    blocks: list[Block]
    output: Tensor | None
    """[vocab_size, hidden_size]; None: the model's own head follows the blocks."""

    def hidden(self, states: Tensor) -> Tensor:
        """Returns what the head's output matrix reads, [L, hidden_size], for final states of the model."""
        for block in self.blocks:
            states = block(states)
        return states

    def to(self, device: torch.device, dtype: torch.dtype) -> MedusaHead:
        """Returns the head on a device."""
        blocks = [Block(block.weight.to(device, dtype), block.bias.to(device, dtype)) for block in self.blocks]
        return MedusaHead(blocks, self.output.to(device, dtype) if self.output is not None else None)


def logits_of(heads: Sequence[MedusaHead], states: Tensor, model_head: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Returns each head's logits, float32 [L, vocab_size], for final states [L, hidden_size] of the model.

    Heads that share the model's are multiplied with it together: it is read once.
    """
    hidden = [head.hidden(states) for head in heads]
    own = [head.output for head in heads if head.output is not None]
    if not own:
        return list(model_head(torch.cat(hidden)).chunk(len(heads)))
    return [functional.linear(each, output).float() for each, output in zip(hidden, own, strict=True)]
