"""Products of any number of rows with a matrix of 4-bit numbers, by kernels of few rows or as 16-bit numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from runner_svc.cuda.int4.dequantize import Workspace
from runner_svc.cuda.int4.few_rows import Int4Products
from runner_svc.cuda.int4.packed_matrix import PackedInt4Matrix, packed_tiles
from runner_svc.interface.products.linear_launchers import GatedLauncher, QuantizedRows, Rows
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows
from runner_svc.weights.activation_rounding import Rounding
from runner_svc.weights.matrix import Matrix

MOST_ROWS = 512
"""Up to this number of rows, kernels of few rows that read the matrix several times are faster than dequantization."""

_WIDE_ROWS = range(MAX_ROWS + 1, MOST_ROWS + 1)


class Int4Linear:
    """A `LinearLauncher`."""

    def __init__(self, workspace: Workspace, few_rows: Int4Products | None, wide: Int4Products | None = None) -> None:
        """`few_rows` is None on a GPU that lacks them. `wide`, if given, multiplies more rows than those at once."""
        self._workspace = workspace
        self._few_rows = few_rows
        self._wide = wide
        self._compiled: set[tuple[object, ...]] = set()

    def adds(self, matrix: Matrix) -> bool:
        """Returns False."""
        return False

    def takes(self, matrix: Matrix, rows: int) -> None:
        """Returns None."""

    def multiply(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> None:
        """Fills `out` [T, out]. Raises TypeError for quantized rows or a matrix in another layout."""
        if isinstance(x, QuantizedRows):
            raise TypeError("products of 4-bit matrices take no quantized rows")
        matrix = packed_tiles(matrix)
        few_rows = self._few_rows if self._few_rows is not None and self._few_rows.fits(matrix) else None
        self._compile(matrix, few_rows, out.dtype)
        if few_rows is None or len(x) > MOST_ROWS:
            self._workspace.plain(stream, matrix).multiply(matrix.gathered(x), bias, out)
            return
        if self._wide is not None and len(x) > MAX_ROWS:
            self._wide.store(stream, ScaledRows(x, None), matrix, out, bias)
            return
        for rows in pieces(len(x)):
            few_rows.store(stream, ScaledRows(x[rows], None), matrix, out[rows], bias, as_most=len(x) > MAX_ROWS)

    def add(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, total: Tensor, factor: float) -> None:
        """Adds to `total` [T, out]; raises as `multiply`."""
        product = torch.empty_like(total)
        self.multiply(stream, x, matrix, bias, product)
        total.add_(product, alpha=factor)

    def _compile(self, matrix: PackedInt4Matrix, few_rows: Int4Products | None, out: torch.dtype) -> None:
        """Compiles the kernels for steps of any size when such a matrix is first multiplied, at start-up."""
        key = (matrix.tiles.shape, matrix.group, matrix.scale_dtype, matrix.has_zeros, out)
        if key not in self._compiled:
            self._compiled.add(key)
            self._workspace.compile(matrix)
            if few_rows is not None:
                few_rows.compile((MAX_ROWS,), matrix, "EPILOGUE_STORE", out)
                if self._wide is not None:
                    self._wide.compile(_WIDE_ROWS, matrix, "EPILOGUE_STORE", out)


class Int4Gated:
    """A `GatedLauncher`. Its kernels of few rows are used from 129 rows on, and by fewer where that is faster."""

    def __init__(
        self, workspace: Workspace, few_rows: Int4Products, many_rows: GatedLauncher, wide: Int4Products | None = None
    ) -> None:
        """`many_rows` multiplies with plain matrices. `wide`, if given, multiplies more than `few_rows` can at once."""
        self._workspace = workspace
        self._few_rows = few_rows
        self._many_rows = many_rows
        self._wide = wide

    def fits(self, matrix: Matrix) -> bool:
        """Returns whether both kernels support this matrix."""
        if not isinstance(matrix, PackedInt4Matrix) or not self._few_rows.fits(matrix):
            return False
        return self._many_rows.fits(self._workspace.empty(matrix))

    def prepare(self, max_tokens: int, matrix: Matrix) -> None:
        """Compiles the kernels for up to `max_tokens` rows. Raises TypeError for a matrix in another layout."""
        matrix = packed_tiles(matrix)
        self._workspace.compile(matrix)
        self._few_rows.compile((MAX_ROWS,), matrix, "EPILOGUE_GATED", self._workspace.dtype)
        if self._wide is not None:
            self._wide.compile(_WIDE_ROWS, matrix, "EPILOGUE_GATED", self._workspace.dtype)
        if max_tokens > MOST_ROWS:
            self._many_rows.prepare(max_tokens, self._workspace.empty(matrix))

    def __call__(self, stream: int, x: Rows, matrix: Matrix, out: Tensor, takes: Rounding | None = None) -> Rows:
        """Returns `out` [T, n], which it fills. Raises TypeError for quantized rows or a matrix in another layout."""
        if isinstance(x, QuantizedRows):
            raise TypeError("products of 4-bit matrices take no quantized rows")
        matrix = packed_tiles(matrix)
        if len(x) > MOST_ROWS:
            return self._many_rows(stream, matrix.gathered(x), self._workspace.plain(stream, matrix), out)
        if self._wide is not None and len(x) > MAX_ROWS:
            self._wide.launch(stream, "EPILOGUE_GATED", ScaledRows(x, None), matrix, out)
            return out
        for rows in pieces(len(x)):
            given = ScaledRows(x[rows], None)
            self._few_rows.launch(stream, "EPILOGUE_GATED", given, matrix, out[rows], as_most=True)
        return out


def pieces(num_rows: int) -> Iterator[slice]:
    """Yields slices of up to 128 rows."""
    for begin in range(0, num_rows, MAX_ROWS):
        yield slice(begin, begin + MAX_ROWS)
