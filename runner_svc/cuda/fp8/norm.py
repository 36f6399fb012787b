"""Launches kernels/fp8_norm.cu: addition, RMSNorm and rounding to e4m3 in one pass."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from runner_svc.cuda.fp8.rows import RoundingArguments, quantized, rounded_rows, row_defines
from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import load
from runner_svc.interface.products.linear_launchers import QuantizedRows, Sums
from runner_svc.weights.activation_rounding import Rounding


class Fp8Norm:
    """The norms of one model whose rows the next product takes rounded; x and weights are in bfloat16."""

    def __init__(self, width: int, eps: float, *, overlap: bool = False) -> None:
        """`width` is that of the residual stream."""
        self._width, self._eps, self._overlap = width, eps, overlap
        self._kernel = lru_cache(None)(self._compile)

    def rounds(self, rounding: Rounding) -> bool:
        """Returns whether it has this rounding."""
        return self._width % 16 == 0 and RoundingArguments.known(rounding)

    def __call__(
        self, stream: int, hidden: Sums | None, residual: Tensor, weight: Tensor, rounding: Rounding
    ) -> QuantizedRows:
        """Computes residual += hidden, unless that is None; returns rms_norm(residual) * weight, rounded.

        Rows are [T, width], contiguous.
        """
        scaling = hidden.scaling if hidden is not None else None
        told = RoundingArguments.of(rounding)
        out = rounded_rows(len(residual), self._width, residual.device)
        self._kernel(hidden is not None, scaling is not None, told.grouped, told.static)(
            stream,
            len(residual),
            address_of(hidden.sums if hidden is not None else None),
            address_of(scaling.factors if scaling is not None else None),
            address_of(scaling.scales if scaling is not None else None),
            residual.data_ptr(),
            weight.data_ptr(),
            self._eps,
            told.bound,
            out.codes.data_ptr(),
            out.factors.data_ptr(),
            out.scales.data_ptr(),
            out.scales.shape[1],
        )
        return quantized(out, rounding)

    def _compile(self, add: bool, scaled: bool, grouped: bool, static: bool) -> Kernel:
        sizes, threads = row_defines(self._width)
        defines = {
            **sizes,
            "ADD": int(add),
            "SCALED": int(scaled),
            "GROUPED": int(grouped),
            "STATIC": int(static),
        }
        # hidden, its factors and scales; residual, weight; eps, bound; codes, factors, scales, their pitch
        return Kernel(load("fp8_norm", defines), "fp8_norm", "PPPPPffPPPi", threads, overlap=self._overlap)
