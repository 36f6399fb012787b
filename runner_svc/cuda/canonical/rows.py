"""Launches kernels/canonical_residual.cu: rows of the residual stream around products, in the canonical order."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import load
from runner_svc.cuda.products.skinny_variant import num_tiles
from runner_svc.interface.products.canonical_launchers import NormedRows

_THREADS = 256


class CanonicalRows:
    """Embeddings, and what follows products whose sums are in memory."""

    def __init__(self, eps: float, *, overlap: bool = False) -> None:
        self._eps, self._overlap = eps, overlap
        self._kernel = lru_cache(None)(self._compile)

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
        self._launch(
            stream, "ENDS_TAKE", None, NormedRows(out, None), source, indexes, residual, norm_weight, out, squares
        )
        return NormedRows(out, squares)

    def add(
        self,
        stream: int,
        parts: Tensor,
        x: NormedRows,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        squares: Tensor,
    ) -> NormedRows:
        """Adds norm(sum of parts) to `residual` [T, n]; then as `take`."""
        self._launch(stream, "ENDS_RESIDUAL", parts, x, None, None, residual, norm_weight, out, squares)
        return NormedRows(out, squares)

    def _launch(
        self,
        stream: int,
        ends: str,
        parts: Tensor | None,
        x: NormedRows,
        source: Tensor | None,
        indexes: Tensor | None,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        out: Tensor,
        squares: Tensor | None,
    ) -> None:
        width = x.rows.shape[1]
        self._kernel(ends, len(parts) if parts is not None else 1)(
            stream,
            len(out),
            address_of(parts),
            parts.stride(0) if parts is not None else 0,
            address_of(x.squares),
            num_tiles(width),
            1.0 / width,
            self._eps,
            address_of(source),
            address_of(indexes),
            address_of(residual),
            address_of(norm_weight),
            out.data_ptr(),
            out.stride(0),
            address_of(squares),
            out.shape[1],
        )

    def _compile(self, ends: str, parts: int) -> Kernel:
        module = load("canonical_residual", {"CANONICAL": 1, "ENDS": ends, "PARTS": parts})
        return Kernel(module, "canonical_residual", "PqPiffPPPPPqPi", _THREADS, overlap=self._overlap)
