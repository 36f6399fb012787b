"""Interfaces of the products of linear layers on a GPU; `runner_svc.cuda.products` implements them.

Weights are matrices in some format (`runner_svc.weights.matrix`). Each class of matrices may have launchers of its own,
for any number of rows (`LinearLauncher`, `GatedLauncher`) and for few (`skinny_launchers`). What a class lacks is done
by slower launches that are right for every class, so a decoder never asks for the format.

An input may arrive as numbers or, where the product takes it so and the kernel before can make it, as the codes of
an 8-bit format (`Rows`). A product that gets numbers quantizes them itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from runner_svc.weights.activation_rounding import Rounding
from runner_svc.weights.matrix import Matrix


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """Rows [T, width] rounded by `rounding`: codes * scales."""

    codes: Tensor  # float8_e4m3fn [T, width]
    # float32 [T, n]: n is 1, or the number of groups of `rounding.columns` columns.
    scales: Tensor
    rounding: Rounding

    def __len__(self) -> int:
        return self.codes.shape[0]

    def __getitem__(self, rows: slice) -> QuantizedRows:
        return QuantizedRows(self.codes[rows], self.scales[rows], self.rounding)


Rows = Tensor | QuantizedRows
"""The input of a product: [T, width] in the type that is computed in, or quantized."""


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """What sums are yet to be multiplied by: y = sums * factors[:, None] * scales."""

    factors: Tensor  # float32, one of each row
    scales: Tensor  # float32, one of each column


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """A product that the next kernel may have to scale."""

    sums: Tensor  # [T, out], in the type that is computed in; contiguous
    scaling: Scaling | None = None
    """None: `sums` is the product."""


@runtime_checkable
class SummingLauncher(Protocol):
    """A `LinearLauncher` that can leave scales to the next kernel."""

    def sums(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> Sums:
        """Returns x W^T + b, in `out` or in another tensor; `out` is contiguous, in the type that is computed in."""


class LinearLauncher(Protocol):
    """Products with any number of rows. Nothing waits for the device, so that they can be captured."""

    def adds(self, matrix: Matrix) -> bool:
        """Returns whether `add` is one launch that may be faster than `multiply` and an addition in the next norm."""

    def takes(self, matrix: Matrix, rows: int) -> Rounding | None:
        """Returns the rounding of `QuantizedRows` that products of this number of rows take best, or None."""

    def multiply(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> None:
        """Fills `out` [T, out] with x W^T + b.

        `out` is in the type that is computed in or float32; the stride of its rows is free.
        """

    def add(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, total: Tensor, factor: float) -> None:
        """Adds factor * (x W^T + b) to `total` [T, out]."""


class SplittingLauncher(LinearLauncher, Protocol):
    """A `LinearLauncher` that has products of its own for some numbers of rows."""

    def fits(self, matrix: Matrix, rows: int) -> bool:
        """Returns whether it has its own product of that number of rows with this matrix."""


class GatedLauncher(Protocol):
    """activation(x G^T) * (x U^T) with any number of rows, for a matrix of G above U, without biases."""

    def fits(self, matrix: Matrix) -> bool:
        """Returns whether there is such a product for this matrix."""

    def prepare(self, max_tokens: int, matrix: Matrix) -> None:
        """Compiles the kernels for up to `max_tokens` rows, so that no step waits for it."""

    def __call__(self, stream: int, x: Rows, matrix: Matrix, out: Tensor, takes: Rounding | None = None) -> Rows:
        """Computes [T, n] from x [T, width], numbers or as `LinearLauncher.takes` says, and the matrix [2 * n, width].

        All are contiguous. Returns the input of the next product: `out`, which it fills, or rows rounded as that
        product `takes` them.
        """
