"""The device operations that the canonical order names, by the emulator's definitions: exactly, in torch on a CPU.

`EmulatedArithmetic` repeats tests/support/emulator/numbers.hpp. A GPU's own are in `canonical_device`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_COEFFICIENTS = (
    *(1.0 / divisor for divisor in (479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2)),
    1.0,
    1.0,
)


class Arithmetic(Protocol):
    """What a device does in its own way."""

    def step(self, sums: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Returns float32 sums [..., M, N] plus left [..., M, 16] times right [..., N, 16], of 16 bits, in one step."""

    def exp2(self, x: Tensor) -> Tensor:
        """Returns ex2.approx.ftz of float32."""

    def divide(self, numerator: float, x: Tensor) -> Tensor:
        """Returns div.approx.ftz of float32."""


class EmulatedArithmetic:
    """The emulator's operations."""

    def step(self, sums: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Cuts terms to 25 bits below the leading one of the largest, and the sum to a float32."""
        terms = left.double().unsqueeze(-2) * right.double().unsqueeze(-3)
        most = torch.maximum(terms.abs().amax(dim=-1), sums.double().abs())
        exponent = torch.frexp(most).exponent - 1
        per_unit = _power_of_two(25 - exponent)
        units = (sums.double() * per_unit).trunc() + (terms * per_unit.unsqueeze(-1)).trunc().sum(dim=-1)  # exact
        exact = units * _power_of_two(exponent - 25)
        cut = (exact.view(torch.int64) & ~((1 << 29) - 1)).view(torch.float64)
        return torch.where(most == 0, 0.0, cut).float()

    def exp2(self, x: Tensor) -> Tensor:
        """Evaluates a fixed polynomial in float64."""
        wide = x.double()
        whole = wide.clamp(min=-200).floor()
        part, power = (wide.clamp(min=-200) - whole) * 0.6931471805599453, torch.zeros_like(wide)
        for coefficient in _COEFFICIENTS:
            power = power * part + coefficient
        return torch.where(x >= -126, power * _power_of_two(whole), 0.0).float()

    def divide(self, numerator: float, x: Tensor) -> Tensor:
        """Divides truly."""
        return numerator / x


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Returns float32 a * b + c, rounded once."""
    product, addend = a.double() * b.double(), c.double()  # the product is exact
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    # To odd: rounding a sum that is not exact twice could go wrong in a tie.
    bits = total.view(torch.int64)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    is_even = (bits & 1) == 0
    inexact = (error != 0) & total.isfinite()
    odd = torch.where(inexact & is_even, bits + toward, bits)
    return odd.view(torch.float64).float()
