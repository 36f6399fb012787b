"""Formats that plain weights can get while they are loaded, a matrix at a time."""

from __future__ import annotations

from collections.abc import Callable

from runner_svc.weights.fp8_matrix import to_fp8
from runner_svc.weights.int4_matrix import to_int4
from runner_svc.weights.matrix import Matrix

_GROUPS = (128, 64, 32)


def quantize_fp8(matrix: Matrix) -> Matrix:
    """Returns the matrix in FP8 per channel, with activations per token."""
    return to_fp8(matrix.dequantized())


def quantize_int4(matrix: Matrix) -> Matrix:
    """Returns the matrix in int4, in the largest groups of 128, 64 or 32 columns that divide it."""
    columns = matrix.size[1]
    group = next((group for group in _GROUPS if columns % group == 0), _GROUPS[-1])
    return to_int4(matrix.dequantized(), group)


ON_LOAD: dict[str, Callable[[Matrix], Matrix]] = {"fp8": quantize_fp8, "int4": quantize_int4}
"""By the value of the runner's setting `quantization`."""
