"""The weights of a linear layer: a matrix in some format, and a bias."""

from __future__ import annotations

from dataclasses import dataclass

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
    def plain_weight(self) -> Tensor | None:
        """The plain matrix; None for another format."""
        return self.matrix.weight if isinstance(self.matrix, PlainMatrix) else None

    @property
    def weight(self) -> Tensor:
        """The plain matrix, for kernels that read no other format. Raises TypeError for another format."""
        if (weight := self.plain_weight) is None:
            raise TypeError(f"a plain matrix is needed, not one in {self.matrix.format}")
        return weight

    @property
    def size(self) -> tuple[int, int]:
        """Columns of y, and columns of x."""
        return self.matrix.size

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Fills `out` [rows, out] with y, for x [rows, in] in the type that is computed in."""
        self.matrix.multiply(x, self.bias, out)

    def add(self, x: Tensor, total: Tensor, factor: float) -> None:
        """Adds factor * y to `total` [rows, out], in place."""
        self.matrix.add(x, self.bias, total, factor)
