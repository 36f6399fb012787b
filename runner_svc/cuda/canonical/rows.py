"""Launches kernels/canonical_residual.cu: the first rows of the residual stream, in the canonical order."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import load
from runner_svc.interface.products.canonical_launchers import NormedRows

_THREADS = 256


class CanonicalRows:
    """Embeddings, and the residual stream before the head."""

    def __init__(self, *, overlap: bool = False) -> None:
        self._overlap = overlap

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

    @cached_property
    def _kernel(self) -> Kernel:
        module = load("canonical_residual", {"CANONICAL": 1})
        return Kernel(module, "canonical_residual", "PPPPPPi", _THREADS, overlap=self._overlap)
