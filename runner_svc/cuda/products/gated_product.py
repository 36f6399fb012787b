"""Launches kernels/gated_product.cu: the gate-up product of many rows with its activation. Only for Hopper."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from runner_svc.cuda.activation import ACTIVATIONS
from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load, num_multiprocessors
from runner_svc.cuda.products.gated_variant import CONSUMER_ROWS, STEP, VECTOR, GatedVariant
from runner_svc.cuda.tensor_map import PLANE, heads_map
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.plain_matrix import PlainMatrix, plain_tensor

Choose = Callable[[int, int, int], GatedVariant]
"""Returns the variant for rows of x, outputs and columns of x."""

# Size of the caches: maps of a model's weights for a few boxes, and per number of rows a map of x and the variant.
_MAX_KEPT = 16384


class GatedProduct:
    """activation(x G^T) * (x U^T) of one model, for any number of rows of x; it pays off above 128."""

    def __init__(self, dtype: torch.dtype, activation: str, choose: Choose, *, overlap: bool = False) -> None:
        """`choose` selects variants. Raises KeyError for an unknown activation."""
        self._dtype = dtype
        self._activation = ACTIVATIONS[activation]
        self._choose = lru_cache(_MAX_KEPT)(choose)
        self._overlap = overlap
        self._kernel = lru_cache(None)(self._compile)
        self._map = lru_cache(_MAX_KEPT)(_matrix_map)

    def fits(self, matrix: Matrix) -> bool:
        """Returns whether the kernel supports this matrix, gate above up."""
        if not isinstance(matrix, PlainMatrix):
            return False
        weight = matrix.weight
        return (
            weight.dtype is self._dtype
            and weight.is_contiguous()
            and weight.shape[0] % (2 * VECTOR) == 0
            and weight.shape[1] % STEP == 0
        )

    def prepare(self, max_tokens: int, matrix: Matrix) -> None:
        """Compiles the kernels for products of up to `max_tokens` rows with such a matrix; a step would wait for it."""
        num_outputs, width = matrix.size[0] // 2, matrix.size[1]
        for num_tokens in range(CONSUMER_ROWS, max_tokens + CONSUMER_ROWS, CONSUMER_ROWS):
            self._kernel(self._choose(num_tokens, num_outputs, width))

    def __call__(self, stream: int, x: Tensor, matrix: Matrix, out: Tensor) -> None:
        """Fills `out` [T, n] from x [T, width] and the matrix [2 * n, width], which is G above U; all contiguous."""
        weight, (num_tokens, width) = plain_tensor(matrix), x.shape
        num_outputs = out.shape[1]
        variant = self._choose(num_tokens, num_outputs, width)
        rows, columns = variant.tiles(num_tokens, num_outputs)
        clusters = min(rows * columns, num_multiprocessors() // variant.cluster)
        self._kernel(variant)(
            stream,
            clusters * variant.cluster,
            self._map(x.data_ptr(), num_tokens, width, variant.input_rows),
            self._map(weight.data_ptr(), 2 * num_outputs, width, variant.columns),
            out.data_ptr(),
            width // STEP,
            num_tokens,
            num_outputs,
            rows,
            columns,
            variant.group,
        )

    def _compile(self, variant: GatedVariant) -> Kernel:
        defines = variant.defines | {"SCALAR": DTYPE_DEFINES[self._dtype], "ACTIVATION": self._activation}
        return Kernel(
            load("gated_product", defines),
            "gated_product",
            "128s128sPiiiiii",  # maps of x and weights; out; steps, rows, outputs; rows, columns and group of clusters
            variant.threads,
            shared_bytes=variant.shared_bytes,
            overlap=self._overlap,
        )


def _matrix_map(address: int, rows: int, width: int, box_rows: int) -> bytes:
    return heads_map(address, width // PLANE, PLANE, rows, width, (box_rows, 1))
