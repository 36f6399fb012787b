"""Products of any number of rows with a matrix of 4-bit numbers, by kernels of few rows or cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.cuda.int4.dequantize import Dequantize
from runner_svc.cuda.int4.few_rows import Int4Products
from runner_svc.cuda.int4.packed_matrix import PackedInt4Matrix, packed_tiles
from runner_svc.interface.products.linear_launchers import QuantizedRows, Rows
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.plain_matrix import PlainMatrix

MOST_ROWS = 512
"""Up to this number of rows, kernels of few rows that read the matrix several times are faster than dequantization."""


class Int4Linear:
    """A `LinearLauncher`.

    Many rows are multiplied by the matrix as 16-bit numbers, which are written before each product into memory that all
    matrices share.
    """

    def __init__(self, dtype: torch.dtype, few_rows: Int4Products | None, *, overlap: bool = False) -> None:
        """`few_rows` is None on a GPU that lacks them."""
        self._dtype = dtype
        self._few_rows = few_rows
        self._dequantize = Dequantize(dtype, overlap=overlap)
        # The last is the largest. Captured graphs may still use the others.
        self._spaces: list[Tensor] = []
        self._compiled: set[tuple[object, ...]] = set()

    def adds(self, matrix: Matrix) -> bool:
        """Returns False."""
        return False

    def takes(self, matrix: Matrix) -> None:
        """Returns None."""

    def multiply(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> None:
        """Fills `out` [T, out]. Raises TypeError for quantized rows or a matrix in another layout."""
        if isinstance(x, QuantizedRows):
            raise TypeError("products of 4-bit matrices take no quantized rows")
        matrix = packed_tiles(matrix)
        few_rows = self._few_rows if self._few_rows is not None and self._few_rows.fits(matrix) else None
        self._compile(matrix, few_rows, out.dtype)
        if few_rows is None or len(x) > MOST_ROWS:
            weight = self._space(matrix.rows * matrix.columns, x.device).view(matrix.size)
            self._dequantize(stream, matrix, weight)
            PlainMatrix(weight).multiply(matrix.gathered(x), bias, out)
            return
        for begin in range(0, len(x), MAX_ROWS):
            rows = slice(begin, begin + MAX_ROWS)
            few_rows.store(stream, ScaledRows(x[rows], None), matrix, out[rows], bias, as_most=len(x) > MAX_ROWS)

    def add(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, total: Tensor, factor: float) -> None:
        """Adds to `total` [T, out]; raises as `multiply`."""
        product = torch.empty_like(total)
        self.multiply(stream, x, matrix, bias, product)
        total.add_(product, alpha=factor)

    def _compile(self, matrix: PackedInt4Matrix, few_rows: Int4Products | None, out: torch.dtype) -> None:
        """Compiles the kernels for steps of any size when such a matrix is first multiplied, at start-up."""
        key = (matrix.tiles.shape, matrix.group, matrix.scale_dtype, matrix.has_zeros, out)
        if key in self._compiled:
            return
        self._compiled.add(key)
        self._dequantize.compile(matrix)
        if few_rows is not None:
            few_rows.compile_most(matrix, out)

    def _space(self, size: int, device: torch.device) -> Tensor:
        if not self._spaces or self._spaces[-1].numel() < size:
            self._spaces.append(torch.empty(size, dtype=self._dtype, device=device))
        return self._spaces[-1][:size]
