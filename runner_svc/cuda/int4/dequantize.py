"""Launches kernels/int4_dequantize.cu: a 4-bit matrix as 16-bit numbers, for products of many rows. On any GPU."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from runner_svc.cuda.int4.packed_matrix import PackedInt4Matrix
from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load
from runner_svc.weights.plain_matrix import PlainMatrix

COLUMNS = 8
"""The number of columns of every matrix is a multiple of it."""
_THREADS = 128


class Dequantize:
    """Writes matrices in one 16-bit type."""

    def __init__(self, dtype: torch.dtype, *, overlap: bool = False) -> None:
        self._dtype = dtype
        self._overlap = overlap
        self._kernel = lru_cache(None)(self._compile)

    def __call__(self, stream: int, matrix: PackedInt4Matrix, out: Tensor) -> None:
        """Fills `out` [rows, columns], contiguous, with W; columns stay in the matrix's own order."""
        tiles, steps, _ = matrix.tiles.shape
        self._kernel(matrix.group, matrix.scale_dtype, matrix.has_zeros)(
            stream, tiles * steps, matrix.tiles.data_ptr(), out.data_ptr(), steps, matrix.rows, matrix.columns
        )

    def compile(self, matrix: PackedInt4Matrix) -> None:
        """Compiles the kernel for such a matrix, so that no step waits for it."""
        self._kernel(matrix.group, matrix.scale_dtype, matrix.has_zeros)

    def _compile(self, group: int, scale: torch.dtype, has_zeros: bool) -> Kernel:
        defines = dequantize_defines(self._dtype, group, scale, has_zeros)
        # matrix, out; steps, rows, columns
        return Kernel(load("int4_dequantize", defines), "int4_dequantize", "PPiii", _THREADS, overlap=self._overlap)


class Workspace:
    """Matrices as 16-bit numbers, one at a time, in memory that all of them share."""

    def __init__(self, dtype: torch.dtype, *, overlap: bool = False) -> None:
        self.dtype = dtype
        self._dequantize = Dequantize(dtype, overlap=overlap)
        # The last is the largest. Captured graphs may still use the others.
        self._spaces: list[Tensor] = []

    def compile(self, matrix: PackedInt4Matrix) -> None:
        """Compiles the kernel for such a matrix, so that no step waits for it."""
        self._dequantize.compile(matrix)

    def plain(self, stream: int, matrix: PackedInt4Matrix) -> PlainMatrix:
        """Returns the matrix, valid until the next call; columns stay in the packed matrix's own order."""
        plain = self.empty(matrix)
        self._dequantize(stream, matrix, plain.weight)
        return plain

    def empty(self, matrix: PackedInt4Matrix) -> PlainMatrix:
        """Returns the memory for the matrix."""
        size = matrix.rows * matrix.columns
        if not self._spaces or self._spaces[-1].numel() < size:
            self._spaces.append(torch.empty(size, dtype=self.dtype, device=matrix.tiles.device))
        return PlainMatrix(self._spaces[-1][:size].view(matrix.size))


def dequantize_defines(dtype: torch.dtype, group: int, scale: torch.dtype, has_zeros: bool) -> dict[str, int | str]:
    """Returns the source's macros."""
    return {
        "SCALAR": DTYPE_DEFINES[dtype],
        "GROUP": group,
        "SCALE": DTYPE_DEFINES[scale],
        "ZEROS": int(has_zeros),
    }
