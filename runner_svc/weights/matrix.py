"""What a matrix in a format of weights can do; the only place that a decoder knows of formats.

A format is one class of matrices. `dequantized` and `rounded` define it: its product is `twin`, and every kernel is
compared with that. A format that holds numbers as they are computed with is `plain_matrix`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from runner_svc.weights.cpu_products import plain_product, tiled_product
from runner_svc.weights.matrix_part import common_unit

Product = Callable[[Tensor], Tensor]
"""Takes x [rows, columns of the matrix] and returns [rows, rows of the matrix]."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where a matrix may be cut: at multiples of these, and at its ends."""

    rows: int = 1
    columns: int = 1

    def check(self, size: tuple[int, int], rows: slice, columns: slice) -> None:
        """Raises ValueError unless both slices begin and end where the matrix of that size may be cut."""
        for name, unit, whole, cut in zip(
            ("row", "column"), (self.rows, self.columns), size, (rows, columns), strict=True
        ):
            for place in (cut.start, cut.stop):
                if not 0 <= place <= whole or (place % unit and place != whole):
                    raise ValueError(f"a matrix of {whole} {name}s can't be cut at {name} {place}, only every {unit}")


class Matrix(ABC):
    """W [out, in] on one device. Matrices are immutable."""

    @property
    @abstractmethod
    def format(self) -> str:
        """Name of the format, for logs, fingerprints and comparison."""

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """Rows, which are columns of y = x W^T, and columns."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that a product reads of it, scales included."""

    @property
    @abstractmethod
    def cuts(self) -> Cuts:
        """Where it may be cut."""

    @abstractmethod
    def cut(self, rows: slice, columns: slice) -> Self:
        """Returns a part, a view where that is possible. Raises ValueError for a place where it can't be cut."""

    def finer(self, rows: slice, columns: slice) -> Self | None:
        """Returns the same numbers in a form that can be cut there: itself, or in smaller groups; None if none can."""
        units = self.cuts
        fits = [
            whole == common_unit(whole, places, size)
            for whole, places, size in zip((units.rows, units.columns), (rows, columns), self.size, strict=True)
        ]
        return self if all(fits) else None

    def with_zeros(self, rows: int, columns: int) -> Self | None:
        """Returns the matrix with zeros up to that size; None if its format has no such matrix."""
        return None

    @abstractmethod
    def reordered(self, order: Tensor) -> Self:
        """Returns the rows in that order, int64 [out]. Raises ValueError where rows can't be moved one by one."""

    @abstractmethod
    def beneath(self, others: list[Matrix]) -> Self | None:
        """Returns the matrix with the others' rows below its own; None if the others are not exactly alike."""

    @abstractmethod
    def dequantized(self) -> Tensor:
        """Returns the numbers that it stands for, float32 [out, in], or its own tensor if that is plain."""

    def rounded(self, x: Tensor) -> Tensor:
        """Returns x [rows, in] as the product takes it: the numbers that its quantized activations stand for."""
        return x

    def twin(self, x: Tensor) -> Tensor:
        """Returns x W^T, float32 [rows, out]: the definition of the product, with sums in float64."""
        return (self.rounded(x).double() @ self.dequantized().double().t()).float()

    @property
    def can_add(self) -> bool:
        """Whether `add` is one launch on a GPU."""
        return False

    def product(self, bias: Tensor | None, *, keep_plain: bool) -> Product:
        """Returns y = x W^T + b on the CPU, for few rows and for many.

        With `keep_plain` the numbers are dequantized once, in two layouts, which takes 8 bytes each and is fastest.
        Otherwise, each call dequantizes some rows at a time, and the matrix takes no more memory than `num_bytes`.
        """
        if not keep_plain:
            return self._tiled(bias)
        plain = plain_product(self.dequantized(), bias, keep_plain=True)
        return lambda x: plain(self.rounded(x))

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Fills `out` [rows, out] with x W^T + b on any device.

        This default is right for every format, in float32, and slow.
        """
        out.copy_(self._tiled(bias)(x.float()))

    def add(self, x: Tensor, bias: Tensor | None, total: Tensor, factor: float) -> None:
        """Adds factor * (x W^T + b) to `total` [rows, out], in place; see `multiply`."""
        total.add_(self._tiled(bias)(x.float()), alpha=factor)

    def _tiled(self, bias: Tensor | None) -> Product:
        return tiled_product(self.size[0], self._tile, self.rounded, bias)

    def _tile(self, begin: int, end: int) -> Tensor:
        unit = self.cuts.rows
        first, last = begin // unit * unit, min(-(-end // unit) * unit, self.size[0])
        tile = self.cut(slice(first, last), slice(0, self.size[1])).dequantized()
        return tile[begin - first : end - first]


def extended(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the tensor [rows, columns] with zeros behind what it has, as bits."""
    whole = torch.zeros(rows, columns, dtype=tensor.dtype, device=tensor.device)
    whole[: tensor.shape[0], : tensor.shape[1]] = tensor
    return whole


def joined(matrices: list[Matrix]) -> Matrix:
    """Returns one matrix with the rows of all, in this order. Neighbours that are not alike stay apart within it."""
    if len(matrices) == 1:
        return matrices[0]
    whole = matrices[0].beneath(matrices[1:])
    if whole is not None:
        return whole
    parts = matrices[:1]
    for matrix in matrices[1:]:
        merged = parts[-1].beneath([matrix])
        parts[-1:] = [parts[-1], matrix] if merged is None else [merged]
    return JoinedMatrix(tuple(parts))


@dataclass(frozen=True, slots=True, eq=False)
class JoinedMatrix(Matrix):
    """Rows of matrices that can't be one: of other formats, other static scales or another order of columns."""

    parts: tuple[Matrix, ...]

    @property
    def format(self) -> str:
        """Names of the parts' formats."""
        return " and ".join(dict.fromkeys(part.format for part in self.parts))

    @property
    def size(self) -> tuple[int, int]:
        return sum(part.size[0] for part in self.parts), self.parts[0].size[1]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def cuts(self) -> Cuts:
        """Its rows can't be cut."""
        return Cuts(self.size[0], max(part.cuts.columns for part in self.parts))

    def cut(self, rows: slice, columns: slice) -> JoinedMatrix:
        self.cuts.check(self.size, rows, columns)
        return JoinedMatrix(tuple(part.cut(slice(0, part.size[0]), columns) for part in self.parts))

    def reordered(self, order: Tensor) -> JoinedMatrix:
        """Returns the rows in an order that leaves each in its part."""
        parts, begin = [], 0
        for part in self.parts:
            end = begin + part.size[0]
            own = order[begin:end] - begin
            if len(own) and not 0 <= int(own.min()) <= int(own.max()) < part.size[0]:
                raise ValueError("rows of matrices that differ can't change places")
            parts.append(part.reordered(own))
            begin = end
        return JoinedMatrix(tuple(parts))

    def with_zeros(self, rows: int, columns: int) -> JoinedMatrix | None:
        first, *others = (
            part.with_zeros(part.size[0] + (rows - self.size[0] if part is self.parts[-1] else 0), columns)
            for part in self.parts
        )
        if first is None or any(other is None for other in others):
            return None
        return JoinedMatrix((first, *(other for other in others if other is not None)))

    def beneath(self, others: list[Matrix]) -> None:
        return None

    def dequantized(self) -> Tensor:
        """Returns the parts' numbers, float32; only the product of each part rounds its activations."""
        return torch.cat([part.dequantized().float() for part in self.parts])

    def twin(self, x: Tensor) -> Tensor:
        return torch.cat([part.twin(x) for part in self.parts], dim=-1)

    def _tiled(self, bias: Tensor | None) -> Product:
        return self._side_by_side(bias, lambda part, own: part._tiled(own))

    def product(self, bias: Tensor | None, *, keep_plain: bool) -> Product:
        return self._side_by_side(bias, lambda part, own: part.product(own, keep_plain=keep_plain))

    def _side_by_side(self, bias: Tensor | None, make: Callable[[Matrix, Tensor | None], Product]) -> Product:
        products, begin = [], 0
        for part in self.parts:
            end = begin + part.size[0]
            products.append(make(part, bias[begin:end] if bias is not None else None))
            begin = end
        return lambda x: torch.cat([product(x) for product in products], dim=-1)
