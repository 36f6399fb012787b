"""The weights of a layer's experts, stacked. All are on one device, and in one type but where another is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.matrix import Matrix


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpertWeights:
    """An expert that computes every row."""

    gate_up: LinearWeights  # [2 * width, hidden_size], the gate first
    down: LinearWeights  # [hidden_size, width]
    gate: Tensor | None  # [1, hidden_size]: of its output

    def mapped(self, change: Callable[[Matrix], Matrix]) -> SharedExpertWeights:
        """Returns those with other matrices."""
        return SharedExpertWeights(self.gate_up.mapped(change), self.down.mapped(change), self.gate)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """A router and its experts."""

    router: LinearWeights  # [num_experts, hidden_size]; may be in float32
    gate_up: Tensor  # [num_experts, 2 * width, hidden_size], the gate first
    gate_up_bias: Tensor | None  # [num_experts, 2 * width]
    down: Tensor  # [num_experts, hidden_size, width]
    down_bias: Tensor | None  # [num_experts, hidden_size]
    shared: SharedExpertWeights | None = None
    corrections: Tensor | None = None  # float32 [num_experts]

    def mapped(self, change: Callable[[Matrix], Matrix]) -> ExpertWeights:
        """Returns those with another router and other matrices of the shared expert."""
        shared = self.shared.mapped(change) if self.shared is not None else None
        return replace(self, router=self.router.mapped(change), shared=shared)
