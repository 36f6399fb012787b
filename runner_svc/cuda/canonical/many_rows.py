"""Launches kernels/gated_product.cu in the canonical order: many rows with the bits of few. Only for Hopper."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from runner_svc.cuda.activation import ACTIVATIONS
from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import DTYPE_DEFINES, load, num_multiprocessors
from runner_svc.cuda.products.gated_variant import STEP, VECTOR, GatedVariant
from runner_svc.cuda.products.skinny_variant import num_tiles
from runner_svc.cuda.tensor_map import PLANE, heads_map
from runner_svc.interface.products.canonical_launchers import NormedRows

Choose = Callable[[int, int, int], GatedVariant]
"""Returns the variant for rows of x, outputs of a gated product and columns of x."""

_MAX_KEPT = 16384


class ManyRows:
    """Products in one chain over the columns that are multiplied."""

    def __init__(self, eps: float, activation: str, choose: Choose, *, overlap: bool = False) -> None:
        """`choose` selects variants. Raises KeyError for an unknown activation."""
        self._eps, self._overlap = eps, overlap
        self._activation = ACTIVATIONS[activation]
        self._choose = lru_cache(_MAX_KEPT)(choose)
        self._kernel = lru_cache(None)(self._compile)
        self._map = lru_cache(_MAX_KEPT)(_matrix_map)

    def fits(self, weight: Tensor) -> bool:
        """Returns whether the kernel supports this matrix [n, width], which it reads in two halves of rows."""
        return weight.is_contiguous() and weight.shape[0] % (2 * VECTOR) == 0 and weight.shape[1] % STEP == 0

    def gated(self, stream: int, x: NormedRows, weight: Tensor, out: Tensor) -> None:
        """Computes out = activation(norm(x) G^T) * (norm(x) U^T), [T, n]; the weight is G above U."""
        self._launch(stream, "ENDS_GATED", x, weight, out, 0, weight.shape[1])

    def store(self, stream: int, x: NormedRows, weight: Tensor, out: Tensor) -> None:
        """Computes out = norm(x) W^T, bfloat16 [T, n]."""
        self._launch(stream, "ENDS_STORE", x, weight, out, 0, weight.shape[1])

    def sums(self, stream: int, rows: Tensor, weight: Tensor, out: Tensor, begin: int, end: int) -> None:
        """Computes out = x W^T, float32 [T, n], over the columns from `begin` to `end`, multiples of 64."""
        self._launch(stream, "ENDS_SUMS", NormedRows(rows, None), weight, out, begin, end)

    def _launch(self, stream: int, ends: str, x: NormedRows, weight: Tensor, out: Tensor, begin: int, end: int) -> None:
        (num_tokens, width), num_outputs = x.rows.shape, weight.shape[0] // 2
        variant = self._choose(num_tokens, num_outputs, end - begin)
        rows, columns = variant.tiles(num_tokens, num_outputs)
        clusters = min(rows * columns, num_multiprocessors() // variant.cluster)
        self._kernel(variant, ends)(
            stream,
            clusters * variant.cluster,
            self._map(x.rows.data_ptr(), num_tokens, width, variant.input_rows),
            self._map(weight.data_ptr(), 2 * num_outputs, width, variant.columns),
            out.data_ptr(),
            (end - begin) // STEP,
            num_tokens,
            num_outputs,
            rows,
            columns,
            variant.group,
            address_of(x.squares),
            num_tiles(width),
            1.0 / width,
            self._eps,
            begin // STEP,
        )

    def _compile(self, variant: GatedVariant, ends: str) -> Kernel:
        defines = variant.defines | {
            "SCALAR": DTYPE_DEFINES[torch.bfloat16],
            "ACTIVATION": self._activation,
            "CANONICAL": 1,
            "ENDS": ends,
        }
        return Kernel(
            load("gated_product", defines),
            "canonical_product",
            # maps of x and weights; out; steps, rows, outputs; rows, columns and group of clusters; squares, tiles,
            # 1 / width, eps; first step
            "128s128sPiiiiiiPiffi",
            variant.threads,
            shared_bytes=variant.shared_bytes,
            overlap=self._overlap,
        )


def _matrix_map(address: int, rows: int, width: int, box_rows: int) -> bytes:
    return heads_map(address, width // PLANE, PLANE, rows, width, (box_rows, 1))
