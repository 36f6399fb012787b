"""Launches kernels/canonical_residual.cu and canonical_scales.cu: what norms need without a product before them."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import load
from runner_svc.interface.products.canonical_launchers import NormedRows

_THREADS = 256
_LANES = 4
"""Of a row's factor."""


class CanonicalRows:
    """Embeddings, the residual stream before the head or behind experts, and rows' factors."""

    def __init__(self, eps: float, *, overlap: bool = False) -> None:
        self._eps, self._overlap = eps, overlap

    def take(
        self,
        stream: int,
        source: Tensor,
        indexes: Tensor | None,
        norm_weight: Tensor,
        residual: Tensor | None,
        out: Tensor,
        squares: Tensor,
    ) -> NormedRows:
        """Computes out = rows * norm_weight, [T, width], of the rows `indexes`, int32 [T], of `source`; None: of all.

        `residual` [T, width] gets the rows themselves. `squares` [row tiles, tiles, 128] gets their sums of squares.
        """
        self._kernel(
            stream,
            len(out),
            source.data_ptr(),
            address_of(indexes),
            address_of(residual),
            norm_weight.data_ptr(),
            out.data_ptr(),
            squares.data_ptr(),
            out.shape[1],
        )
        return NormedRows(out, squares)

    def scales(self, stream: int, x: NormedRows, out: Tensor) -> None:
        """Computes 1 / rms of each row of x, whose squares are given; `out` is float32 [T]."""
        (rows, width), squares = x.rows.shape, x.squares
        if squares is None:
            raise ValueError("these rows are divided by their RMS already, or have none")
        blocks = -(-rows * _LANES // _THREADS)
        self._scales(stream, blocks, squares.data_ptr(), out.data_ptr(), squares.shape[1], 1.0 / width, self._eps, rows)

    @cached_property
    def _scales(self) -> Kernel:
        module = load("canonical_scales", {"CANONICAL": 1})
        return Kernel(module, "canonical_scales", "PPiffi", _THREADS, overlap=self._overlap)

    @cached_property
    def _kernel(self) -> Kernel:
        module = load("canonical_residual", {"CANONICAL": 1})
        return Kernel(module, "canonical_residual", "PPPPPPi", _THREADS, overlap=self._overlap)
