"""The linear layers of both decoders on the CPU, whatever format their weights are in."""

from __future__ import annotations

from torch import Tensor

from runner_svc.arithmetic.plain import PLAIN, Arithmetic
from runner_svc.weights.linear_weights import LinearWeights


class Linear:
    """y = x W^T + b."""

    def __init__(self, weights: LinearWeights, *, keep_plain: bool = False, arithmetic: Arithmetic = PLAIN) -> None:
        """`keep_plain` takes more memory to be faster: see `product` of the format's matrix."""
        self._product = arithmetic.product(weights, keep_plain=keep_plain)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [rows, out] for x [rows, in]."""
        return self._product(x)
