"""Matrices of numbers in the type that is computed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from runner_svc.weights.cpu_products import plain_product
from runner_svc.weights.matrix import Cuts, Matrix, Product, extended


@dataclass(frozen=True, slots=True, eq=False)
class PlainMatrix(Matrix):
    """W [out, in]."""

    weight: Tensor

    @property
    def format(self) -> str:
        """The numbers' type, such as "bfloat16"."""
        return str(self.weight.dtype).removeprefix("torch.")

    @property
    def size(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    @property
    def cuts(self) -> Cuts:
        """It may be cut anywhere."""
        return Cuts()

    def cut(self, rows: slice, columns: slice) -> PlainMatrix:
        self.cuts.check(self.size, rows, columns)
        return PlainMatrix(self.weight[rows, columns])

    def with_zeros(self, rows: int, columns: int) -> PlainMatrix:
        return PlainMatrix(extended(self.weight, rows, columns))

    def reordered(self, order: Tensor) -> PlainMatrix:
        return PlainMatrix(self.weight[order.to(self.weight.device)])

    def beneath(self, others: list[Matrix]) -> PlainMatrix | None:
        if any(not isinstance(other, PlainMatrix) or other.weight.dtype is not self.weight.dtype for other in others):
            return None
        return PlainMatrix(torch.cat([self.weight, *(cast(PlainMatrix, other).weight for other in others)]))

    def dequantized(self) -> Tensor:
        return self.weight

    def product(self, bias: Tensor | None, *, keep_plain: bool) -> Product:
        return plain_product(self.weight, bias, keep_plain=keep_plain)

    @property
    def can_add(self) -> bool:
        return True

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Fills `out` [rows, out] with x W^T + b. x is converted to the weights' type if that is float32.

        `out` is in the weights' type or, on a GPU, in float32: the sums are float32 anyway.
        """
        if x.dtype is not self.weight.dtype and self.weight.dtype is torch.float32:
            x = x.float()
        if out.dtype is not self.weight.dtype:
            torch.mm(x, self.weight.t(), out_dtype=out.dtype, out=out)
            if bias is not None:
                out.add_(bias)
        elif bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(bias, x, self.weight.t(), out=out)

    def add(self, x: Tensor, bias: Tensor | None, total: Tensor, factor: float) -> None:
        """Adds factor * (x W^T + b) to `total` [rows, out], in place."""
        total.addmm_(x, self.weight.t(), alpha=factor)
        if bias is not None:
            total.add_(bias, alpha=factor)


def plain_tensor(matrix: Matrix) -> Tensor:
    """Returns the numbers of a plain matrix. Raises TypeError for another format."""
    if not isinstance(matrix, PlainMatrix):
        raise TypeError(f"a plain matrix is needed, not one in {matrix.format}")
    return matrix.weight
