"""A layer's mixture of experts on the CPU.

Rows of one expert are multiplied together. Each row then adds up what its experts gave in the order of the router's
logits, so that its bits do not depend on which rows are computed with it. `cuda_experts` is the counterpart on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.decoder.linear import Linear
from runner_svc.decoder.mlp import ACTIVATION_FUNCTIONS
from runner_svc.model.families.experts_config import ClampedGate, ExpertsConfig
from runner_svc.weights.expert_weights import ExpertWeights, SharedExpertWeights
from runner_svc.weights.linear_weights import LinearWeights


class ExpertMlp:
    """Routing, experts, weighted sum."""

    def __init__(self, config: ExpertsConfig, weights: ExpertWeights, *, keep_plain: bool) -> None:
        """`keep_plain` is as in `Linear`."""
        self._config = config
        self._router = Linear(weights.router, keep_plain=keep_plain)
        self._experts = [Expert(config, weights, index, keep_plain=keep_plain) for index in range(config.num_experts)]
        self._shared: SharedExpert | None = None
        if weights.shared is not None:
            self._shared = SharedExpert(config.activation, weights.shared, keep_plain=keep_plain)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [T, hidden_size] for x [T, hidden_size]."""
        experts, weights = route(self._router(x), self._config)
        parts = x.new_empty(*experts.shape, x.shape[-1])  # [T, k, hidden_size]
        for index in experts.unique().tolist():
            rows, ranks = (experts == index).nonzero(as_tuple=True)
            parts[rows, ranks] = self._experts[index](x[rows])
        total = weights[:, :1] * parts[:, 0]
        for rank in range(1, self._config.top_k):
            total.addcmul_(weights[:, rank : rank + 1], parts[:, rank])
        return total if self._shared is None else total + self._shared(x)


class Expert:
    """One expert."""

    def __init__(self, config: ExpertsConfig, weights: ExpertWeights, index: int, *, keep_plain: bool) -> None:
        def linear(weight: Tensor, bias: Tensor | None) -> Linear:
            return Linear(
                LinearWeights(weight[index], bias[index] if bias is not None else None), keep_plain=keep_plain
            )

        self._gate = gate_function(config)
        self._gate_up = linear(weights.gate_up, weights.gate_up_bias)
        self._down = linear(weights.down, weights.down_bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [rows, hidden_size] for x [rows, hidden_size]."""
        return self._down(self._gate(*self._gate_up(x).chunk(2, dim=-1)))


class SharedExpert:
    """The expert that computes every row."""

    def __init__(self, activation: str, weights: SharedExpertWeights, *, keep_plain: bool) -> None:
        self._activation = ACTIVATION_FUNCTIONS[activation]
        self._gate_up = Linear(weights.gate_up, keep_plain=keep_plain)
        self._down = Linear(weights.down, keep_plain=keep_plain)
        self._gate = weights.gate

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [T, hidden_size] for x [T, hidden_size]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return torch.sigmoid(functional.linear(x, self._gate)) * self._down(self._activation(gate).mul_(up))


def route(logits: Tensor, config: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """Returns each row's experts, int64 [T, k], the largest logit first, and their weights, float32 [T, k].

    `logits` are the router's, [T, num_experts].
    """
    logits = logits.float()
    if not config.softmax_first:
        values, experts = logits.topk(config.top_k)
        return experts, values.softmax(dim=-1)
    weights, experts = logits.softmax(dim=-1).topk(config.top_k)
    return experts, weights / weights.sum(dim=-1, keepdim=True) if config.normalize else weights


def gate_function(config: ExpertsConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns what makes an expert's inner row of its gate and its up."""
    if config.clamp is not None:
        clamp: ClampedGate = config.clamp
        return lambda gate, up: _clamped(gate, up, clamp)
    activation = ACTIVATION_FUNCTIONS[config.activation]
    return lambda gate, up: activation(gate) * up


def _clamped(gate: Tensor, up: Tensor, clamp: ClampedGate) -> Tensor:
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))
