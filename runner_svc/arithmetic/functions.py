"""Functions of rows whose bits depend on the row alone: not on other rows, its place, its alignment or the threads.

Additions, products, divisions and square roots of floats are rounded correctly by every loop of torch, one element at a
time, and may be used freely. Three things may not:

- Fused functions such as silu, gelu, softplus and pow: the end of a tensor, and of each thread's share, is computed by
  other code than the rest. exp, log, log1p, tanh, erf, sin and cos have one code for all elements.
- A sum with a single result over 32,768 elements or more: its order depends on the number of threads.
- Multiply-add in one operation: whether it is rounded once or twice is the compiler's choice.

`runner_svc.arithmetic.check` looks at all of this on the machine that serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

MOST_SUMMED = 8192
"""Numbers that are added in one go; longer rows are added in parts of `PART`, then their sums."""
PART = 256


def row_sum(x: Tensor) -> Tensor:
    """Returns the sums over the last dimension of x [..., width], kept as [..., 1], in x's type."""
    width = x.shape[-1]
    if width <= MOST_SUMMED:
        return x.contiguous().sum(dim=-1, keepdim=True)
    padded = functional.pad(x, (0, -width % PART))
    return row_sum(padded.unflatten(-1, (-1, PART)).sum(dim=-1))


def softmax(x: Tensor) -> Tensor:
    """Returns the softmax over the last dimension."""
    weights = (x - x.amax(dim=-1, keepdim=True)).exp_()
    return weights / row_sum(weights)


def log_softmax(x: Tensor) -> Tensor:
    """Returns the log-softmax over the last dimension: (x - max) - log(sum of exp(x - max))."""
    shifted = x - x.amax(dim=-1, keepdim=True)
    return shifted - row_sum(shifted.exp()).log_()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns (x / sqrt(mean(x * x) + eps)) * weight over the last dimension."""
    root = row_sum(x * x).div_(x.shape[-1]).add_(eps).sqrt_()
    return (x / root).mul_(weight)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Returns ((x - mean) / sqrt(mean of squares of x - mean, + eps)) * weight + bias over the last dimension."""
    centred = x - row_sum(x).div_(x.shape[-1])
    root = row_sum(centred * centred).div_(x.shape[-1]).add_(eps).sqrt_()
    normed = centred.div_(root)
    if weight is not None:
        normed.mul_(weight)
    return normed if bias is None else normed.add_(bias)


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest of each row and their indexes, [..., count] each; of equal ones the lower index."""
    ordered = values.sort(dim=-1, descending=True, stable=True)
    return ordered.values[..., :count], ordered.indices[..., :count]


def sigmoid(x: Tensor) -> Tensor:
    """Returns 1 / (1 + exp(-x))."""
    return x.neg().exp_().add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """Returns x / (1 + exp(-x))."""
    denominator = x.neg().exp_().add_(1)
    return torch.div(x, denominator, out=denominator)


def gelu(x: Tensor) -> Tensor:
    """Returns (x / 2) * (1 + erf(x * sqrt(1/2)))."""
    return (x * math.sqrt(0.5)).erf_().add_(1).mul_(x * 0.5)


def gelu_tanh(x: Tensor) -> Tensor:
    """Returns (x / 2) * (1 + tanh(sqrt(2 / pi) * (x + (x * x * x) * 0.044715)))."""
    inner = (x * x).mul_(x).mul_(0.044715).add_(x).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1).mul_(x * 0.5)


def mish(x: Tensor) -> Tensor:
    """Returns x * tanh(log1p(exp(x)))."""
    return x.exp().log1p_().tanh_().mul_(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": lambda x: sigmoid(x * 1.702).mul_(x),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "mish": mish,
}
"""By the name that a model's configuration gives."""
