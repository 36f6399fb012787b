"""What the decoder on the CPU computes with, beyond additions and products of elements: torch's own functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.weights.linear_weights import LinearWeights

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "mish": functional.mish,
}


class Arithmetic:
    """The fastest functions that torch has; the bits of a row may depend on the rows computed with it."""

    adds_in_order = False
    """Whether ranks add up what they have in their order, whatever is fastest."""

    def product(self, weights: LinearWeights, *, keep_plain: bool) -> Callable[[Tensor], Tensor]:
        """Returns y = x W^T + b for rows x [rows, in]; `keep_plain` as in `Matrix.product`."""
        return weights.matrix.product(weights.bias, keep_plain=keep_plain)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalises x [..., width] by its root mean square."""
        return functional.rms_norm(x, weight.shape, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Normalises x [..., width] by mean and variance."""
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def activation(self, name: str) -> Callable[[Tensor], Tensor]:
        """Returns the activation that a model's configuration names."""
        return ACTIVATION_FUNCTIONS[name]

    def sigmoid(self, x: Tensor) -> Tensor:
        """Returns 1 / (1 + exp(-x))."""
        return torch.sigmoid(x)

    def softmax(self, x: Tensor) -> Tensor:
        """Returns the softmax over the last dimension."""
        return x.softmax(dim=-1)

    def row_sum(self, x: Tensor) -> Tensor:
        """Returns the sums over the last dimension, kept as [..., 1]."""
        return x.sum(dim=-1, keepdim=True)

    def largest(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns the `count` largest over the last dimension, in descending order, and their indexes."""
        best = values.topk(count)
        return best.values, best.indices

    def add(self, x: Tensor, y: Tensor, factor: float) -> Tensor:
        """Returns x + factor * y."""
        return torch.add(x, y, alpha=factor)

    def add_product(self, total: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Adds x * y to `total`, in place, and returns it."""
        return total.addcmul_(x, y)


PLAIN = Arithmetic()
