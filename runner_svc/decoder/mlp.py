"""The MLP of a layer on the CPU, dense or a mixture of experts.

Rows of one expert are multiplied together. Each row then adds up what its experts gave in the order in which the router
chose them, so that its bits do not depend on which rows are computed with it. `cuda_experts` is the counterpart on a
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from runner_svc.arithmetic.linear import Linear
from runner_svc.arithmetic.plain import PLAIN, Arithmetic
from runner_svc.model.families.description import MlpDescription
from runner_svc.model.families.experts_config import SIGMOID_SUM, ClampedGate, ExpertsConfig, RouterConfig, Scoring
from runner_svc.weights.expert_matrices import ExpertMatrices
from runner_svc.weights.expert_weights import ExpertWeights, SharedExpertWeights
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.model_weights import MlpWeights


class Mlp(Protocol):
    """What a layer computes between its second norm and its second addition."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [T, hidden_size] for x [T, hidden_size]."""


class DenseMlp:
    """One MLP for all positions."""

    def __init__(
        self, description: MlpDescription, weights: MlpWeights, *, keep_plain: bool, arithmetic: Arithmetic = PLAIN
    ) -> None:
        """`keep_plain` is as in `Linear`."""
        self._activation = arithmetic.activation(description.activation)
        self._is_gated = description.gated
        self._gate_up = Linear(weights.gate_up, keep_plain=keep_plain, arithmetic=arithmetic)
        self._down = Linear(weights.down, keep_plain=keep_plain, arithmetic=arithmetic)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [T, hidden_size] for x [T, hidden_size]."""
        if not self._is_gated:
            return self._down(self._activation(self._gate_up(x)))
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._activation(gate).mul_(up))


class ExpertMlp:
    """Routing, experts, weighted sum."""

    def __init__(
        self, config: ExpertsConfig, weights: ExpertWeights, *, keep_plain: bool, arithmetic: Arithmetic = PLAIN
    ) -> None:
        """`keep_plain` is as in `Linear`."""
        self._config = config
        self._arithmetic = arithmetic
        self._router = Linear(weights.router, keep_plain=keep_plain, arithmetic=arithmetic)
        self._corrections = weights.corrections
        self._experts = [
            Expert(config, weights, index, keep_plain=keep_plain, arithmetic=arithmetic)
            for index in range(config.num_experts)
        ]
        self._shared: SharedExpert | None = None
        if weights.shared is not None:
            self._shared = SharedExpert(config.activation, weights.shared, keep_plain=keep_plain, arithmetic=arithmetic)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [T, hidden_size] for x [T, hidden_size]."""
        experts, weights = route(self._router(x), self._config, self._corrections, self._arithmetic)
        parts = x.new_empty(*experts.shape, x.shape[-1])  # [T, k, hidden_size]
        for index in experts.unique().tolist():
            rows, ranks = (experts == index).nonzero(as_tuple=True)
            parts[rows, ranks] = self._experts[index](x[rows])
        total = weights[:, :1] * parts[:, 0]
        for rank in range(1, self._config.top_k):
            self._arithmetic.add_product(total, weights[:, rank : rank + 1], parts[:, rank])
        return total if self._shared is None else total + self._shared(x)


class Expert:
    """One expert."""

    def __init__(
        self,
        config: ExpertsConfig,
        weights: ExpertWeights,
        index: int,
        *,
        keep_plain: bool,
        arithmetic: Arithmetic = PLAIN,
    ) -> None:
        def linear(matrices: ExpertMatrices, bias: Tensor | None) -> Linear:
            own = bias[index] if bias is not None else None
            return Linear(LinearWeights(matrices.matrices[index], own), keep_plain=keep_plain, arithmetic=arithmetic)

        self._gate = gate_function(config, arithmetic)
        self._gate_up = linear(weights.gate_up, weights.gate_up_bias)
        self._down = linear(weights.down, weights.down_bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [rows, hidden_size] for x [rows, hidden_size]."""
        return self._down(self._gate(*self._gate_up(x).chunk(2, dim=-1)))


class SharedExpert:
    """The expert that computes every row."""

    def __init__(
        self, activation: str, weights: SharedExpertWeights, *, keep_plain: bool, arithmetic: Arithmetic = PLAIN
    ) -> None:
        self._activation = arithmetic.activation(activation)
        self._arithmetic = arithmetic
        self._gate_up = Linear(weights.gate_up, keep_plain=keep_plain, arithmetic=arithmetic)
        self._down = Linear(weights.down, keep_plain=keep_plain, arithmetic=arithmetic)
        self._gate: Linear | None = None
        if weights.gate is not None:
            self._gate = Linear(LinearWeights.plain(weights.gate), keep_plain=True, arithmetic=arithmetic)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [T, hidden_size] for x [T, hidden_size]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        out = self._down(self._activation(gate).mul_(up))
        return out if self._gate is None else self._arithmetic.sigmoid(self._gate(x)) * out


def route(
    logits: Tensor, config: ExpertsConfig, corrections: Tensor | None = None, arithmetic: Arithmetic = PLAIN
) -> tuple[Tensor, Tensor]:
    """Returns each row's experts, int64 [T, k], the first choice first, and their weights, float32 [T, k].

    `logits` are the router's, [T, num_experts], and `corrections` its own, float32 [num_experts].
    """
    router, logits = config.router, logits.float()
    if router.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        values, experts = arithmetic.largest(logits, config.top_k)
        return experts, arithmetic.softmax(values) * router.scale
    scores = arithmetic.sigmoid(logits) if router.scoring is Scoring.SIGMOID else arithmetic.softmax(logits)
    choosing = scores if corrections is None else scores + corrections
    experts = arithmetic.largest(_in_groups(choosing, router, arithmetic), config.top_k)[1]
    weights = scores.gather(-1, experts)
    if router.normalize:
        total = arithmetic.row_sum(weights)
        is_sigmoid = router.scoring is Scoring.SIGMOID
        weights = weights / (total + SIGMOID_SUM if is_sigmoid else total.clamp(min=router.least_sum))
    return experts, weights * router.scale


def _in_groups(scores: Tensor, router: RouterConfig, arithmetic: Arithmetic) -> Tensor:
    """Returns the scores [T, num_experts] with -inf for those of groups out of which none is chosen."""
    if router.groups == 1:
        return scores
    grouped = scores.unflatten(-1, (router.groups, -1))
    best = arithmetic.row_sum(arithmetic.largest(grouped, 2)[0]).squeeze(-1)
    chosen = arithmetic.largest(best, router.top_groups)[1]
    left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, chosen, value=False)
    return grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)


def gate_function(config: ExpertsConfig, arithmetic: Arithmetic = PLAIN) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns what makes an expert's inner row of its gate and its up."""
    if config.clamp is not None:
        clamp: ClampedGate = config.clamp
        return lambda gate, up: _clamped(gate, up, clamp, arithmetic)
    activation = arithmetic.activation(config.activation)
    return lambda gate, up: activation(gate) * up


def _clamped(gate: Tensor, up: Tensor, clamp: ClampedGate, arithmetic: Arithmetic) -> Tensor:
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * arithmetic.sigmoid(gate * clamp.alpha))
