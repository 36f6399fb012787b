"""The weights of a matrix product, in the format in which they are held."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """y = x W^T + b in the one format that there is: W [out, in] and b [out] in the type that is computed in."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Columns of y, and columns of x."""
        return self.weight.shape[0], self.weight.shape[1]

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Fills `out` [rows, out] with y, for x [rows, in] in the weights' type."""
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)

    def add(self, x: Tensor, total: Tensor, factor: float) -> None:
        """Adds factor * y to `total` [rows, out], in place."""
        total.addmm_(x, self.weight.t(), alpha=factor)
        if self.bias is not None:
            total.add_(self.bias, alpha=factor)
