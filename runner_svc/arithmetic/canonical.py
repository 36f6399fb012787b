"""What the decoder computes with in a process that promises bits: see docs/determinism.md."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from torch import Tensor

from runner_svc.arithmetic import functions
from runner_svc.arithmetic.known_numbers import known_numbers
from runner_svc.arithmetic.plain import Arithmetic
from runner_svc.arithmetic.products import canonical_product
from runner_svc.weights.linear_weights import LinearWeights


class CanonicalArithmetic(Arithmetic):
    """Functions whose bits depend on a row alone, in float32."""

    adds_in_order = True

    def __init__(self) -> None:
        self._products = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> bytes:
        """Bits of two rows of each product so far: they depend on weights and on kernels."""
        return self._products.digest()

    def product(self, weights: LinearWeights, *, keep_plain: bool) -> Callable[[Tensor], Tensor]:
        """Returns y = x W^T + b. Raises TypeError for a matrix that is not plain, UnusableSettings if a check fails."""
        product = canonical_product(weights.weight, weights.bias)
        self._products.update(product(known_numbers(2, weights.size[1])).numpy().tobytes())
        return product

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functions.rms_norm(x, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return functions.layer_norm(x, weight, bias, eps)

    def activation(self, name: str) -> Callable[[Tensor], Tensor]:
        return functions.ACTIVATIONS[name]

    def sigmoid(self, x: Tensor) -> Tensor:
        return functions.sigmoid(x)

    def softmax(self, x: Tensor) -> Tensor:
        return functions.softmax(x)

    def row_sum(self, x: Tensor) -> Tensor:
        return functions.row_sum(x)

    def largest(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return functions.largest(values, count)

    def add(self, x: Tensor, y: Tensor, factor: float) -> Tensor:
        return x + y if factor == 1.0 else x + y * factor

    def add_product(self, total: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return total.add_(x * y)
