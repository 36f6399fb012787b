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
from runner_svc.cuda.products.skinny_variant import canonical_parts, num_tiles
from runner_svc.cuda.tensor_map import PLANE, heads_map
from runner_svc.interface.products.canonical_launchers import NormedRows

Choose = Callable[[int, int, int], GatedVariant]
"""Returns the variant for rows of x, outputs of a gated product and columns of x."""

_MAX_KEPT = 16384


class ManyRows:
    """Products whose parts of the columns are launches of their own."""

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

    def gated(self, stream: int, x: NormedRows, weight: Tensor, out: Tensor, earlier: Tensor | None = None) -> None:
        """Computes out = activation(norm(x) G^T) * (norm(x) U^T), [T, n]; the weight is G above U.

        `earlier`: the sums of all parts of the columns but the last, float32 [T, 2 * n]; None for one part.
        """
        self._launch(stream, "ENDS_GATED", x, weight, out, earlier)

    def store(self, stream: int, x: NormedRows, weight: Tensor, out: Tensor, earlier: Tensor | None = None) -> None:
        """Computes out = norm(x) W^T, bfloat16 [T, n]; `earlier` as in `gated`."""
        self._launch(stream, "ENDS_STORE", x, weight, out, earlier)

    def sums(self, stream: int, x: NormedRows, weight: Tensor, out: Tensor, part: int) -> None:
        """Adds the product of a part of the columns to `out`, float32 [T, n], which the first part fills."""
        self._launch(stream, "ENDS_SUMS", x, weight, out, out if part else None, part)

    def _launch(
        self,
        stream: int,
        ends: str,
        x: NormedRows,
        weight: Tensor,
        out: Tensor,
        earlier: Tensor | None,
        part: int | None = None,
    ) -> None:
        """`part` None: the last."""
        (num_tokens, width), num_outputs = x.rows.shape, weight.shape[0] // 2
        parts, steps = canonical_parts(*weight.shape), width // STEP
        part = parts - 1 if part is None else part
        begin, end = steps * part // parts, steps * (part + 1) // parts
        variant = self._choose(num_tokens, num_outputs, (end - begin) * STEP)
        rows, columns = variant.tiles(num_tokens, num_outputs)
        clusters = min(rows * columns, num_multiprocessors() // variant.cluster)
        self._kernel(variant, ends)(
            stream,
            clusters * variant.cluster,
            self._map(x.rows.data_ptr(), num_tokens, width, variant.input_rows),
            self._map(weight.data_ptr(), 2 * num_outputs, width, variant.columns),
            out.data_ptr(),
            end - begin,
            num_tokens,
            num_outputs,
            rows,
            columns,
            variant.group,
            address_of(x.squares),
            num_tiles(width),
            1.0 / width,
            self._eps,
            begin,
            address_of(earlier),
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
            # 1 / width, eps; first step; earlier sums
            "128s128sPiiiiiiPiffiP",
            variant.threads,
            shared_bytes=variant.shared_bytes,
            overlap=self._overlap,
        )


def _matrix_map(address: int, rows: int, width: int, box_rows: int) -> bytes:
    return heads_map(address, width // PLANE, PLANE, rows, width, (box_rows, 1))
