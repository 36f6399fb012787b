"""The MLP of a layer on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from runner_svc.decoder.linear import Linear
from runner_svc.model.families.description import MlpDescription
from runner_svc.weights.model_weights import MlpWeights

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class Mlp(Protocol):
    """What a layer computes between its second norm and its second addition."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [T, hidden_size] for x [T, hidden_size]."""


class DenseMlp:
    """One MLP for all positions."""

    def __init__(self, description: MlpDescription, weights: MlpWeights, *, keep_plain: bool) -> None:
        """`keep_plain` is as in `Linear`."""
        self._activation = ACTIVATION_FUNCTIONS[description.activation]
        self._is_gated = description.gated
        self._gate_up = Linear(weights.gate_up, keep_plain=keep_plain)
        self._down = Linear(weights.down, keep_plain=keep_plain)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [T, hidden_size] for x [T, hidden_size]."""
        if not self._is_gated:
            return self._down(self._activation(self._gate_up(x)))
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._activation(gate).mul_(up))
