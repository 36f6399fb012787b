"""The weights of a linear layer: a matrix in some format, and a bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from runner_svc.weights.matrix import Matrix
from runner_svc.weights.plain_matrix import PlainMatrix, plain_tensor


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
        """The plain matrix, for what reads no other format. Raises TypeError for another format."""
        return plain_tensor(self.matrix)

    @property
    def size(self) -> tuple[int, int]:
        """Columns of y, and columns of x."""
        return self.matrix.size

    def mapped(self, change: Callable[[Matrix], Matrix]) -> LinearWeights:
        """Returns those with another matrix."""
        return LinearWeights(change(self.matrix), self.bias)
