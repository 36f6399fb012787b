"""A layer's mixture of experts, read from a Hugging Face configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's gate: (up + 1) * gate * sigmoid(alpha * gate), gate clamped from above and up on both sides."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Sizes and switches of the experts of a layer; immutable."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Of an expert."""
    softmax_first: bool
    """Weights are those of the softmax over all experts; else of the softmax over the chosen ones."""
    normalize: bool
    """Weights of a row add up to 1; those of a softmax over the chosen ones always do."""
    activation: str
    bias: bool = False
    """The router and the experts' matrices have biases."""
    clamp: ClampedGate | None = None
    """Instead of activation(gate) * up."""
    shared_size: int | None = None
    """Intermediate size of an expert that every row goes to, times the sigmoid of a gate of its own."""
