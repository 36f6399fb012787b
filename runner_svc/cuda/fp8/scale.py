"""Launches kernels/fp8_scale.cu, which scales the sums that torch's FP8 product leaves."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from runner_svc.cuda.activation import ACTIVATIONS
from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import DTYPE_DEFINES, load

_THREADS = 256


class Fp8Scale:
    """The scaling of one model's products."""

    def __init__(self, activation: str, *, overlap: bool = False) -> None:
        """Raises KeyError for an unknown activation."""
        self._activation = ACTIVATIONS[activation]
        self._overlap = overlap
        self._kernel = lru_cache(None)(self._compile)

    def __call__(
        self,
        stream: int,
        raw: Tensor,
        factors: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        out: Tensor,
        *,
        gated: bool = False,
    ) -> None:
        """Fills `out` [T, n] from `raw` [T, n], bfloat16 or float32, factors of rows, and scales and bias of columns.

        With `gated`, `raw` is [T, 2 * n], the gate first, and there is no bias.
        """
        rows, width = raw.shape
        self._kernel(width, raw.dtype, out.dtype, gated, bias is not None)(
            stream,
            -(-rows * out.shape[1] // 8 // _THREADS),
            raw.data_ptr(),
            factors.data_ptr(),
            scales.data_ptr(),
            address_of(bias),
            out.data_ptr(),
            out.stride(0),
            rows,
        )

    def _compile(self, width: int, raw: torch.dtype, out: torch.dtype, gated: bool, has_bias: bool) -> Kernel:
        defines: dict[str, int | str] = {
            "WIDTH": width,
            "RAW": DTYPE_DEFINES[raw],
            "OUT": DTYPE_DEFINES[out],
            "GATED": int(gated),
            "BIAS": int(has_bias),
            "ACTIVATION": self._activation,
        }
        # raw, factors, scales, bias; out, its stride; rows
        return Kernel(load("fp8_scale", defines), "fp8_scale", "PPPPPqi", _THREADS, overlap=self._overlap)
