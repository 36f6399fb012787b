"""The weights of a linear layer: a matrix in some format, and a bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner_svc.weights.matrix import Matrix
from runner_svc.weights.plain_matrix import PlainMatrix


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """y = x W^T + b: W [out, in], and b [out] in the type that is computed in."""

    matrix: Matrix
    bias: Tensor | None = None

    @classmethod
    def plain(cls, weight: Tensor, bias: Tensor | None = None) -> LinearWeights:
        """Returns those of a matrix [out, in] in the type that is computed in."""
        return cls(PlainMatrix(weight), bias)

    @property
    def weight(self) -> Tensor:
        """The plain matrix, for kernels that read no other format. Raises TypeError for another format."""
        if not isinstance(self.matrix, PlainMatrix):
            raise TypeError(f"a plain matrix is needed, not one in {self.matrix.format}")
        return self.matrix.weight

    @property
    def size(self) -> tuple[int, int]:
        """Columns of y, and columns of x."""
        return self.matrix.size

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
