"""Launchers that choose another by a matrix's class, and do what no other can do.

A `JoinedMatrix` is one launch for each of its parts, into slices of the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from runner_svc.interface.products.expert_launchers import ActivationLauncher
from runner_svc.interface.products.linear_launchers import (
    GatedLauncher,
    LinearLauncher,
    QuantizedRows,
    Rows,
    SummingLauncher,
    Sums,
)
from runner_svc.interface.products.skinny_launchers import (
    ProductLauncher,
    RouterParts,
    RoutingProducts,
    ScaledRows,
    TileSums,
)
from runner_svc.weights.activation_rounding import Rounding
from runner_svc.weights.matrix import JoinedMatrix, Matrix


class OwnMethods:
    """The matrix's own methods as a `LinearLauncher`: cuBLAS for plain ones, slow for others, and right for all."""

    def adds(self, matrix: Matrix) -> bool:
        """Returns whether the matrix can add in its product."""
        return matrix.can_add

    def takes(self, matrix: Matrix, rows: int) -> None:
        """Returns None."""

    def multiply(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> None:
        """Fills `out` on torch's current stream. Raises TypeError for quantized rows."""
        matrix.multiply(_numbers(x), bias, out)

    def add(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, total: Tensor, factor: float) -> None:
        """Adds to `total` on torch's current stream. Raises TypeError for quantized rows."""
        matrix.add(_numbers(x), bias, total, factor)


class LinearProducts:
    """A `LinearLauncher` for every matrix."""

    def __init__(self, by_class: Mapping[type[Matrix], LinearLauncher]) -> None:
        self._by_class = by_class
        self._others = OwnMethods()

    def adds(self, matrix: Matrix) -> bool:
        """Returns whether every part can add in its product."""
        return all(self._launcher(part).adds(part) for part, _ in parts(matrix))

    def takes(self, matrix: Matrix, rows: int) -> Rounding | None:
        """Returns the rounding of rows that all parts accept."""
        if not isinstance(matrix, JoinedMatrix):
            return self._launcher(matrix).takes(matrix, rows)
        taken = [self._launcher(part).takes(part, rows) for part in matrix.parts]
        return taken[0] if all(each == taken[0] for each in taken) else None

    def multiply(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> None:
        """Fills `out` [T, out]."""
        if not isinstance(matrix, JoinedMatrix):
            self._launcher(matrix).multiply(stream, x, matrix, bias, out)
            return
        for part, columns in parts(matrix):
            own = bias[columns] if bias is not None else None
            self._launcher(part).multiply(stream, x, part, own, out[:, columns])

    def sums(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> Sums:
        """Returns the product, or sums; in `out` or in another tensor."""
        launcher = self._launcher(matrix)
        if isinstance(launcher, SummingLauncher):
            return launcher.sums(stream, x, matrix, bias, out)
        self.multiply(stream, x, matrix, bias, out)
        return Sums(out)

    def add(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, total: Tensor, factor: float) -> None:
        """Adds to `total` [T, out]."""
        if not isinstance(matrix, JoinedMatrix):
            self._launcher(matrix).add(stream, x, matrix, bias, total, factor)
            return
        for part, columns in parts(matrix):
            own = bias[columns] if bias is not None else None
            self._launcher(part).add(stream, x, part, own, total[:, columns], factor)

    def _launcher(self, matrix: Matrix) -> LinearLauncher:
        return self._by_class.get(type(matrix), self._others)


class GatedProducts:
    """A `GatedLauncher` for the matrices that have one."""

    def __init__(self, by_class: Mapping[type[Matrix], GatedLauncher]) -> None:
        self._by_class = by_class

    def fits(self, matrix: Matrix) -> bool:
        """Returns whether the matrix's class has such a launcher, and it fits."""
        launcher = self._by_class.get(type(matrix))
        return launcher is not None and launcher.fits(matrix)

    def prepare(self, max_tokens: int, matrix: Matrix) -> None:
        """Compiles the kernels for up to `max_tokens` rows. Raises KeyError for a matrix that does not fit."""
        self._by_class[type(matrix)].prepare(max_tokens, matrix)

    def __call__(self, stream: int, x: Rows, matrix: Matrix, out: Tensor, takes: Rounding | None = None) -> Rows:
        """Returns `out` or rounded rows. Raises KeyError for a matrix that does not fit."""
        return self._by_class[type(matrix)](stream, x, matrix, out, takes)


class FewRowProducts:
    """A `ProductLauncher` for the matrices that have one, and for those whose parts have."""

    def __init__(self, by_class: Mapping[type[Matrix], ProductLauncher], activation: ActivationLauncher) -> None:
        """`activation` is that of the products with gates."""
        self._by_class = by_class
        self._activation = activation

    def fits(self, matrix: Matrix) -> bool:
        """Returns whether the class of every part has such a launcher, and it fits."""
        return all(type(part) in self._by_class and self._by_class[type(part)].fits(part) for part, _ in parts(matrix))

    def store(self, stream: int, x: ScaledRows, matrix: Matrix, out: Tensor) -> None:
        """Fills `out` [T, out]."""
        if not isinstance(matrix, JoinedMatrix):
            self._by_class[type(matrix)].store(stream, x, matrix, out)
            return
        for part, columns in parts(matrix):
            self._by_class[type(part)].store(stream, x, part, out[:, columns])

    def gated(self, stream: int, x: ScaledRows, matrix: Matrix, out: Tensor, sums: TileSums) -> ScaledRows:
        """Fills `out` [T, n]; for matrices of several parts, with a tensor between product and activation."""
        if not isinstance(matrix, JoinedMatrix):
            return self._by_class[type(matrix)].gated(stream, x, matrix, out, sums)
        gate_up = torch.empty(len(out), matrix.size[0], dtype=out.dtype, device=out.device)
        self.store(stream, x, matrix, gate_up)
        self._activation(stream, gate_up, out)
        return ScaledRows(out, None)

    def add(
        self,
        stream: int,
        x: ScaledRows,
        matrix: Matrix,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        sums: TileSums,
    ) -> ScaledRows:
        """Adds to `residual`. Raises KeyError for a matrix of several parts, which no output or down matrix is."""
        return self._by_class[type(matrix)].add(stream, x, matrix, residual, norm_weight, out, sums)

    def add_and_route(
        self,
        stream: int,
        x: ScaledRows,
        matrix: Matrix,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        sums: TileSums,
        router: RouterParts,
    ) -> ScaledRows:
        """As `add`, with the router's logits where the matrix's products have them."""
        launcher = self._by_class[type(matrix)]
        if isinstance(launcher, RoutingProducts):
            return launcher.add_and_route(stream, x, matrix, residual, norm_weight, out, sums, router)
        return launcher.add(stream, x, matrix, residual, norm_weight, out, sums)


def parts(matrix: Matrix) -> Iterator[tuple[Matrix, slice]]:
    """Yields the matrices that one consists of, each with its columns of the output."""
    begin = 0
    for part in matrix.parts if isinstance(matrix, JoinedMatrix) else (matrix,):
        end = begin + part.size[0]
        yield part, slice(begin, end)
        begin = end


def _numbers(x: Rows) -> Tensor:
    if isinstance(x, QuantizedRows):
        raise TypeError("these products take no quantized rows")
    return x
