"""Launches kernels/add_rms_norm.cu: RMSNorm with or without the addition to the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load

_MAX_THREADS = 512


class AddRmsNorm:
    """Norms of one model: sizes and eps are fixed, weights are passed per call."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, eps: float, *, overlap: bool = False) -> None:
        """Raises ValueError if rows do not split into vectors of 16 bytes."""
        row, threads = row_defines(hidden_size)
        defines: dict[str, int | str] = {"SCALAR": DTYPE_DEFINES[dtype], **row}
        self._eps = eps
        self._kernels = [
            Kernel(load("add_rms_norm", {**defines, "ADD": add}), "add_rms_norm", "PPPPqf", threads, overlap=overlap)
            for add in (0, 1)
        ]

    def add(self, stream: int, hidden: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> None:
        """Computes residual += hidden; out = rms_norm(residual) * weight.

        All are [T, hidden_size]; `out` may be `hidden`.
        """
        self._kernels[1](
            stream,
            hidden.shape[0],
            hidden.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            hidden.stride(0),
            self._eps,
        )

    def add_normed(
        self, stream: int, hidden: Tensor, residual: Tensor, post_weight: Tensor, weight: Tensor | None, out: Tensor
    ) -> None:
        """Is not among these kernels: see `runner_svc.cuda.residual_norm`."""
        raise NotImplementedError

    def norm(self, stream: int, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        """Computes out = rms_norm(hidden) * weight; `hidden` may be rows of a wider tensor, `out` is contiguous."""
        self._kernels[0](
            stream,
            hidden.shape[0],
            hidden.data_ptr(),
            0,
            weight.data_ptr(),
            out.data_ptr(),
            hidden.stride(0),
            self._eps,
        )


def row_defines(hidden_size: int) -> tuple[dict[str, int], int]:
    """Returns a row's macros and the threads of a block. Raises ValueError as `AddRmsNorm`."""
    if hidden_size % 8:
        raise ValueError(f"the GPU kernels need a hidden size of a multiple of 8, not {hidden_size}")
    vectors = hidden_size // 8
    threads = min(_MAX_THREADS, -(-vectors // 32) * 32)
    return {"HIDDEN_SIZE": hidden_size, "VECTORS": -(-vectors // threads)}, threads
