"""A linear layer on a GPU, whatever format its weights are in."""

from __future__ import annotations

from torch import Tensor

from runner_svc.interface.products.linear_launchers import LinearLauncher, Rows, SummingLauncher, Sums
from runner_svc.weights.activation_rounding import Rounding
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.matrix import Matrix


class CudaLinear:
    """y = x W^T + b, for any number of rows."""

    def __init__(self, weights: LinearWeights, launcher: LinearLauncher) -> None:
        """`launcher` is one for every class of matrices."""
        self.matrix: Matrix = weights.matrix
        self._bias = weights.bias
        self._launcher = launcher

    @property
    def adds(self) -> bool:
        """Whether `add` may be faster than an addition in the next norm."""
        return self._launcher.adds(self.matrix)

    def takes(self, rows: int) -> Rounding | None:
        """Returns the rounding of that number of rows that it is best given quantized."""
        return self._launcher.takes(self.matrix, rows)

    def multiply(self, stream: int, x: Rows, out: Tensor) -> None:
        """Fills `out` [T, out] with y; it may be float32."""
        self._launcher.multiply(stream, x, self.matrix, self._bias, out)

    def sums(self, stream: int, x: Rows, out: Tensor) -> Sums:
        """Returns y, or sums that the next kernel scales, in `out` or in another tensor; `out` is contiguous."""
        if isinstance(self._launcher, SummingLauncher):
            return self._launcher.sums(stream, x, self.matrix, self._bias, out)
        self.multiply(stream, x, out)
        return Sums(out)

    def add(self, stream: int, x: Rows, total: Tensor, factor: float) -> None:
        """Adds factor * y to `total` [T, out]."""
        self._launcher.add(stream, x, self.matrix, self._bias, total, factor)
