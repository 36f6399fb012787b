"""Medusa's heads: residual blocks over the model's final state, then a head of logits.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads". Head 0 reads the
state from which the model draws a token, and guesses the token behind it; each further head guesses one further.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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

    def logits(self, states: Tensor, model_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns float32 [L, vocab_size] for final states [L, hidden_size] of the model."""
        for block in self.blocks:
            states = block(states)
        if self.output is None:
            return model_head(states)
        return functional.linear(states, self.output).float()
