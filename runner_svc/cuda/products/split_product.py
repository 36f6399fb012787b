"""Launches kernels/split_product.cu: products of one to four hundred rows. Only for Hopper."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load, num_multiprocessors
from runner_svc.cuda.products.split_variant import STEP, VECTOR, SplitVariant
from runner_svc.cuda.tensor_map import PLANE, heads_map
from runner_svc.interface.products.linear_launchers import LinearLauncher, QuantizedRows, Rows
from runner_svc.weights.activation_rounding import Rounding
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.plain_matrix import PlainMatrix, plain_tensor

_FEWEST, _MOST = 129, 384
"""Rows: fewer are a tile of which half is empty, more make cuBLAS's tiles large."""
# Maps of a model's weights, and of x and the variant for every number of rows.
_MAX_KEPT = 16384


class SplitProduct:
    """x W^T of one model, by clusters of blocks that share tiles where it fits; a `SplittingLauncher`."""

    def __init__(self, dtype: torch.dtype, others: LinearLauncher, *, overlap: bool = False) -> None:
        """`others` do what does not fit."""
        self._dtype = dtype
        self._others = others
        self._overlap = overlap
        self._choose = lru_cache(_MAX_KEPT)(partial(SplitVariant.choose, num_multiprocessors()))
        self._kernel = lru_cache(None)(self._compile)
        self._map = lru_cache(_MAX_KEPT)(_matrix_map)

    def fits(self, matrix: Matrix, rows: int) -> bool:
        """Returns whether the kernel has products of that number of rows with this matrix."""
        if not isinstance(matrix, PlainMatrix) or not _FEWEST <= rows <= _MOST:
            return False
        weight = matrix.weight
        return (
            weight.dtype is self._dtype
            and weight.is_contiguous()
            and weight.shape[0] % VECTOR == 0
            and weight.shape[1] % STEP == 0
        )

    def adds(self, matrix: Matrix) -> bool:
        """As the others."""
        return self._others.adds(matrix)

    def takes(self, matrix: Matrix, rows: int) -> Rounding | None:
        """As the others."""
        return self._others.takes(matrix, rows)

    def add(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, total: Tensor, factor: float) -> None:
        """Adds factor * (x W^T + b) to `total` [T, out]."""
        if factor != 1.0 or isinstance(x, QuantizedRows) or not self._is_own(x, matrix, bias, total):
            self._others.add(stream, x, matrix, bias, total, factor)
        else:
            self._launch(stream, x, matrix, total, adding=True)

    def multiply(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> None:
        """Fills `out` [T, out] with x [T, width] W^T + b."""
        if isinstance(x, QuantizedRows) or not self._is_own(x, matrix, bias, out):
            self._others.multiply(stream, x, matrix, bias, out)
        else:
            self._launch(stream, x, matrix, out, adding=False)

    def _is_own(self, x: Tensor, matrix: Matrix, bias: Tensor | None, out: Tensor) -> bool:
        return (
            bias is None
            and self.fits(matrix, len(x))
            and x.is_contiguous()
            and out.is_contiguous()
            and out.dtype is self._dtype
        )

    def _launch(self, stream: int, x: Tensor, matrix: Matrix, out: Tensor, *, adding: bool) -> None:
        weight, (rows, width), outputs = plain_tensor(matrix), x.shape, out.shape[1]
        variant = self._choose(rows, outputs, width)
        self._kernel(variant, adding)(
            stream,
            variant.blocks(rows, outputs),
            self._map(x.data_ptr(), rows, width, variant.rows),
            self._map(weight.data_ptr(), outputs, width, variant.columns, read_once=True),
            out.data_ptr(),
            variant.steps(width),
            rows,
            outputs,
            variant.row_tiles(rows),
        )

    def _compile(self, variant: SplitVariant, adding: bool) -> Kernel:
        defines = variant.defines | {"SCALAR": DTYPE_DEFINES[self._dtype], "ADDING": int(adding)}
        return Kernel(
            load("split_product", defines),
            "split_product",
            "128s128sPiiii",  # maps of x and weights; out; steps, rows, outputs, rows of tiles
            variant.threads,
            shared_bytes=variant.shared_bytes,
            overlap=self._overlap,
        )


def _matrix_map(address: int, rows: int, width: int, box_rows: int, *, read_once: bool = False) -> bytes:
    return heads_map(address, width // PLANE, PLANE, rows, width, (box_rows, 1), read_once=read_once)
