"""Integers in groups of adjacent columns: what the numbers of all formats of this folder are, whatever bits hold them.

W[o, i] = (codes[o, i] - middle) * scales[o, g] + offsets[o, g], g the group of column i.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from runner_svc.weights import cpu_products
from runner_svc.weights.cpu_products import (
    Nibbles,
    bfloat16_product,
    can_pack_int4,
    nibble_product,
    plain_product,
    tiled_product,
)
from runner_svc.weights.matrix import Matrix, Product

# Rows up to which torch's product with int4 weights is faster than one with dequantized tiles, by the products that a
# matrix takes: for tiles in float32, and in bfloat16.
_FEW_ROWS, _FEW_ROWS_OF_BFLOAT16 = {1: 128, 2: 16}, {1: 48, 2: 8}


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """The integers of a matrix, unpacked."""

    codes: Tensor  # uint8 [out, in]
    bits: int
    """Of a code."""
    middle: int
    scales: Tensor  # float32 [out, groups]
    offsets: Tensor | None = None  # float32 [out, groups]

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    def numbers(self) -> Tensor:
        """Returns float32 [out, in]."""
        numbers = self.codes.float().sub_(self.middle) if self.middle else self.codes.float()
        grouped = numbers.unflatten(1, (-1, self.group)).mul_(self.scales.unsqueeze(-1))
        if self.offsets is not None:
            grouped.add_(self.offsets.unsqueeze(-1))
        return grouped.flatten(1)

    def nibbles(self) -> list[Nibbles]:
        """Returns four-bit matrices whose sum this one is: one, or the low and the high bits of codes of up to 8."""
        high, low = divmod(self.middle, 16)
        offsets = self.scales * (8 - low)
        if self.offsets is not None:
            offsets = offsets + self.offsets
        if self.bits <= 4:
            return [Nibbles(self.codes, self.scales, offsets)]
        # The high bits of the middle become 8, for which torch's product has zero: so their numbers are exact.
        upper = (self.codes >> 4) + (8 - high)
        return [
            Nibbles(self.codes & 15, self.scales, offsets),
            Nibbles(upper, self.scales * 16, torch.zeros_like(self.scales)),
        ]


class GroupedMatrix(Matrix):
    """A matrix of such integers."""

    @abstractmethod
    def grouped(self) -> Grouped:
        """Returns its integers."""

    def dequantized(self) -> Tensor:
        return self.grouped().numbers()

    def product(self, bias: Tensor | None, *, keep_plain: bool) -> Product:
        """Returns y = x W^T + b on the CPU.

        Without `keep_plain`, few rows are multiplied by torch's product with int4 weights, and many with dequantized
        tiles. Where that product lacks the sizes, the numbers are dequantized once: tiles alone take several times as
        long for few rows. All but numbers that are dequantized to float32 are in bfloat16, by which y errs by 0.3%.
        """
        if keep_plain:
            return Matrix.product(self, bias, keep_plain=True)
        grouped = self.grouped()
        if not can_pack_int4(grouped.codes.device, *self.size, grouped.group):
            return _dequantized_once(grouped.numbers(), bias)
        nibbles = grouped.nibbles()
        few = nibble_product(nibbles, grouped.group, bias)
        most = (_FEW_ROWS_OF_BFLOAT16 if cpu_products.has_bfloat16() else _FEW_ROWS)[len(nibbles)]
        many = self._tiled_in_bfloat16(bias) if cpu_products.has_bfloat16() else self._tiled(bias)
        return lambda x: few(x) if len(x) <= most else many(x)

    def _tiled_in_bfloat16(self, bias: Tensor | None) -> Product:
        multiply = tiled_product(self.size[0], self._tile, lambda x: x.to(torch.bfloat16), None)

        def product(x: Tensor) -> Tensor:
            y = multiply(x).to(x.dtype)
            return y if bias is None else y.add_(bias)

        return product


def _dequantized_once(numbers: Tensor, bias: Tensor | None) -> Product:
    """Returns y = x W^T + b with 2 bytes a number where the CPU multiplies bfloat16, otherwise with 4."""
    if not cpu_products.has_bfloat16():
        return plain_product(numbers, bias, keep_plain=False)
    multiply = bfloat16_product(numbers.to(torch.bfloat16))
    return lambda x: multiply(x) if bias is None else multiply(x).add_(bias)
