"""The attention of one layer, beyond what the KV cache says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # configurations are read without torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """Window, scale, cap, sinks and first key; the defaults are plain causal attention."""

    # Tokens that a query sees, itself included; None sees all.
    window: int | None = None
    # Factor of the dot products; None is 1 / sqrt(head_dim).
    scale: float | None = None
    # Scaled scores s become cap * tanh(s / cap); None leaves them.
    soft_cap: float | None = None
    # float32 [num_heads]: logits that join the softmax of a head and have no value; None has none.
    sinks: Tensor | None = None
    # Positions before it are seen by no query. Only attention of verify rows knows it.
    first: int = 0
