"""Launches kernels/fp8_many.cu: products of 65 to 256 rows with a matrix of FP8. Only for Hopper."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from runner_svc.cuda.activation import ACTIVATIONS
from runner_svc.cuda.fp8.many_variant import MOST_ROWS, TILE_ROWS, VECTOR, Fp8ManyVariant
from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import load, num_multiprocessors
from runner_svc.cuda.tensor_map import codes_map
from runner_svc.interface.products.linear_launchers import QuantizedRows
from runner_svc.weights.fp8_matrix import Fp8Matrix

Choose = Callable[..., Fp8ManyVariant | None]
"""As `Fp8ManyVariant.choose`."""

# Size of the cache: maps of a model's weights for a few boxes, and of rounded rows.
_MAX_KEPT = 16384


class Fp8ManyRows:
    """The products of one model's matrices, whose rows are given quantized."""

    def __init__(self, activation: str, choose: Choose = Fp8ManyVariant.choose, *, overlap: bool = False) -> None:
        """`choose` selects variants. Raises KeyError for an unknown activation."""
        self._activation = ACTIVATIONS[activation]
        self._choose = choose
        self._overlap = overlap
        self._kernel = lru_cache(None)(self._compile)
        self._map = lru_cache(_MAX_KEPT)(codes_map)
        self._compiled: set[tuple[object, ...]] = set()

    def store(self, stream: int, x: QuantizedRows, weight: Fp8Matrix, out: Tensor) -> bool:
        """Fills `out` [T, out], bfloat16, with x W^T; returns False, without that, where torch's product is faster.

        The stride of `out`'s rows is even.
        """
        return self._launch(stream, x, weight, out, gated=False)

    def gated(self, stream: int, x: QuantizedRows, weight: Fp8Matrix, out: Tensor) -> bool:
        """The same with activation(x G^T) * (x U^T); the matrix [2 * n, width] is G above U, `out` is [T, n]."""
        return self._launch(stream, x, weight, out, gated=True)

    def _launch(self, stream: int, x: QuantizedRows, weight: Fp8Matrix, out: Tensor, *, gated: bool) -> bool:
        if not _fits(out):
            return False
        self._prepare(weight, gated)
        (rows, width), outputs, grouped = x.codes.shape, out.shape[1], weight.block is not None
        variant = self._variant(rows, weight, gated)
        if variant is None:
            return False
        tile_rows, tile_columns = variant.tiles(rows, outputs)
        self._kernel(variant)(
            stream,
            variant.clusters(num_multiprocessors(), rows, outputs) * variant.cluster,
            self._map(x.codes.data_ptr(), rows, width, TILE_ROWS, read_once=False),
            self._map(weight.codes.data_ptr(), weight.size[0], width, variant.weight_rows, read_once=True),
            0 if grouped else x.scales.data_ptr(),
            x.scales.data_ptr() if grouped else 0,
            weight.scales.data_ptr(),
            out.data_ptr(),
            width,
            rows,
            outputs,
            out.stride(0),
            x.scales.stride(1) if grouped else 0,
            tile_rows,
            tile_columns,
        )
        return True

    def _prepare(self, weight: Fp8Matrix, gated: bool) -> None:
        """Compiles the kernels for such a matrix when it is first multiplied, at start, so that no step waits."""
        key = (*weight.size, weight.block, gated)
        if key in self._compiled:
            return
        self._compiled.add(key)
        for rows in range(TILE_ROWS, MOST_ROWS + TILE_ROWS, TILE_ROWS):
            variant = self._variant(rows, weight, gated)
            if variant is not None:
                self._kernel(variant)

    def _variant(self, rows: int, weight: Fp8Matrix, gated: bool) -> Fp8ManyVariant | None:
        outputs, width = weight.size[0] // 2 if gated else weight.size[0], weight.size[1]
        return self._choose(rows, outputs, width, gated=gated, grouped=weight.block is not None)

    def _compile(self, variant: Fp8ManyVariant) -> Kernel:
        defines = variant.defines | ({"ACTIVATION": self._activation} if variant.gated else {})
        return Kernel(
            load("fp8_many", defines),
            "fp8_many",
            # maps of x and weights; factors and scales of x, scales of weights, out; width, rows, outputs, stride of
            # out, pitch of scales; rows and columns of clusters
            "128s128sPPPPiiiiiii",
            variant.threads,
            shared_bytes=variant.shared_bytes,
            overlap=self._overlap,
        )


def _fits(out: Tensor) -> bool:
    return (
        out.dtype is torch.bfloat16
        and out.shape[1] % VECTOR == 0
        and out.stride(0) % 2 == 0
        and out.stride(1) == 1
        and not out.data_ptr() % 4
    )
