"""Matrices of 4-bit numbers with an offset for each group of columns, and their products.

GGUF's Q4_1 and Q4_K are W = (code - 8) * scale + offset. The first term is a `PackedInt4Matrix`. The second is a plain
product of the offsets with the sums of each group of x's columns: it has a group's share of the columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner_svc.cuda.int4.any_rows import Int4Linear
from runner_svc.cuda.int4.packed_matrix import PackedInt4Matrix, packed
from runner_svc.interface.products.linear_launchers import QuantizedRows, Rows
from runner_svc.weights.blocks.grouped import GroupedMatrix
from runner_svc.weights.int4_matrix import Int4Matrix
from runner_svc.weights.int4_packing import pack_pairs
from runner_svc.weights.matrix import Cuts, Matrix
from runner_svc.weights.plain_matrix import PlainMatrix


@dataclass(frozen=True, slots=True, eq=False)
class OffsetInt4Matrix(Matrix):
    """Such a matrix as the kernels read it."""

    packed: PackedInt4Matrix
    offsets: PlainMatrix  # [out, groups]
    group: int
    format_name: str

    @property
    def format(self) -> str:
        """The format of the matrix that was packed."""
        return self.format_name

    @property
    def size(self) -> tuple[int, int]:
        return self.packed.size

    @property
    def num_bytes(self) -> int:
        return self.packed.num_bytes + self.offsets.num_bytes

    @property
    def cuts(self) -> Cuts:
        """It can't be cut."""
        return self.packed.cuts

    def cut(self, rows: slice, columns: slice) -> OffsetInt4Matrix:
        self.cuts.check(self.size, rows, columns)
        return self

    def reordered(self, order: Tensor) -> OffsetInt4Matrix:
        """Raises ValueError: rows are moved before they are packed."""
        raise ValueError("rows of a packed matrix can't be moved")

    def beneath(self, others: list[Matrix]) -> None:
        return None

    def dequantized(self) -> Tensor:
        spread = self.offsets.weight.float().repeat_interleave(self.group, dim=1)
        return self.packed.dequantized() + spread

    def sums(self, x: Tensor) -> Tensor:
        """Returns the sums of each group of x's columns, [rows, groups]."""
        return x.unflatten(-1, (-1, self.group)).sum(dim=-1)


def with_offsets(matrix: GroupedMatrix, dtype: torch.dtype) -> OffsetInt4Matrix | None:
    """Returns the matrix in that layout, its scales in float16 and its offsets in `dtype`.

    None for integers of more than four bits, and for groups that the kernels lack.
    """
    grouped = matrix.grouped()
    nibbles = grouped.nibbles()
    if len(nibbles) > 1:
        return None
    codes, scales = nibbles[0].codes, nibbles[0].scales.half()
    tiles = packed(Int4Matrix(pack_pairs(codes), scales, None, grouped.group, matrix.size[1]))
    if tiles is None or tiles.group != grouped.group:
        return None
    return OffsetInt4Matrix(tiles, PlainMatrix(nibbles[0].offsets.to(dtype)), grouped.group, matrix.format)


class OffsetInt4Linear:
    """A `LinearLauncher` of such matrices."""

    def __init__(self, codes: Int4Linear) -> None:
        """`codes` multiplies with the first term."""
        self._codes = codes

    def adds(self, matrix: Matrix) -> bool:
        """Returns False."""
        return False

    def takes(self, matrix: Matrix, rows: int) -> None:
        """Returns None."""

    def multiply(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> None:
        """Fills `out` [T, out]. Raises TypeError for quantized rows or a matrix in another layout."""
        if isinstance(x, QuantizedRows) or not isinstance(matrix, OffsetInt4Matrix):
            raise TypeError("products of 4-bit numbers with offsets take plain rows and such a matrix")
        self._codes.multiply(stream, x, matrix.packed, bias, out)
        if out.dtype is x.dtype:
            matrix.offsets.add(matrix.sums(x), None, out, 1.0)
            return
        product = torch.empty_like(out)
        matrix.offsets.multiply(matrix.sums(x), None, product)
        out.add_(product)

    def add(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, total: Tensor, factor: float) -> None:
        """Adds to `total` [T, out]; raises as `multiply`."""
        product = torch.empty_like(total)
        self.multiply(stream, x, matrix, bias, product)
        total.add_(product, alpha=factor)
