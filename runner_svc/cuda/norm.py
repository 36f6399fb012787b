"""Launches kernels/add_rms_norm.cu (RMSNorm, added to or not) and kernels/residual_norm.cu (other norms)."""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import DTYPE_DEFINES, load
from runner_svc.model.families.description import NormKind

_MAX_THREADS = 512

KINDS = {NormKind.RMS: 0, NormKind.RMS_PLUS_ONE: 1, NormKind.LAYER: 2}
"""The kernel's KIND."""


_Variant = tuple[bool, bool, bool]
"""Whether a kernel adds, norms what it adds, and writes a norm."""
_VARIANTS: list[_Variant] = [(False, False, True), (True, False, True)]
_POST_VARIANTS: list[_Variant] = [*_VARIANTS, (True, True, True), (True, True, False)]


class AddRmsNorm:
    """Norms of one model: sizes and eps are fixed, weights are passed per call."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, eps: float, *, overlap: bool = False) -> None:
        """Raises ValueError if rows do not split into vectors of 16 bytes."""
        row, threads = _row_defines(hidden_size)
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
        """Is not among these kernels: see `ResidualNorm`."""
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


class ResidualNorm:
    """Norms of one model: sizes, eps, kind and factor are fixed, weights are passed per call and are as `NormKind`."""

    def __init__(
        self,
        hidden_size: int,
        dtype: torch.dtype,
        eps: float,
        kind: NormKind,
        *,
        multiplier: float = 1.0,
        post_norms: bool = False,
        overlap: bool = False,
    ) -> None:
        """`multiplier` is a factor of what is added; `post_norms` compiles what `add_normed` needs.

        Raises ValueError if rows do not split into vectors of 16 bytes.
        """
        row, threads = _row_defines(hidden_size)
        fixed: dict[str, int | str] = {
            "SCALAR": DTYPE_DEFINES[dtype],
            **row,
            "KIND": KINDS[kind],
            "MULTIPLIER": f"{float(multiplier)!r}f",
        }
        self._eps = eps
        self._kernels: dict[_Variant, Kernel] = {}
        for variant in _POST_VARIANTS if post_norms else _VARIANTS:
            add, post, out = (int(flag) for flag in variant)
            module = load("residual_norm", {**fixed, "ADD": add, "POST": post, "OUT": out})
            self._kernels[variant] = Kernel(module, "residual_norm", "PPPPqfP", threads, overlap=overlap)

    def add(self, stream: int, hidden: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> None:
        """Computes residual += multiplier * hidden; out = norm(residual).

        All are [T, hidden_size]; `out` may be `hidden`.
        """
        self._launch(stream, hidden, residual, None, weight, out)

    def add_normed(
        self, stream: int, hidden: Tensor, residual: Tensor, post_weight: Tensor, weight: Tensor | None, out: Tensor
    ) -> None:
        """Computes residual += multiplier * norm(hidden); out = norm(residual), unless `weight` is None.

        The first norm has `post_weight`, the second `weight`. All are [T, hidden_size]; `out` may be `hidden`.
        """
        self._launch(stream, hidden, residual, post_weight, weight, out)

    def norm(self, stream: int, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        """Computes out = norm(hidden); `hidden` may be rows of a wider tensor, `out` is contiguous."""
        self._launch(stream, hidden, None, None, weight, out)

    def _launch(
        self,
        stream: int,
        hidden: Tensor,
        residual: Tensor | None,
        post_weight: Tensor | None,
        weight: Tensor | None,
        out: Tensor,
    ) -> None:
        self._kernels[residual is not None, post_weight is not None, weight is not None](
            stream,
            hidden.shape[0],
            hidden.data_ptr(),
            address_of(residual),
            address_of(weight),
            out.data_ptr(),
            hidden.stride(0),
            self._eps,
            address_of(post_weight),
        )


def _row_defines(hidden_size: int) -> tuple[dict[str, int], int]:
    """Returns a row's macros and the threads of a block. Raises ValueError as `AddRmsNorm`."""
    if hidden_size % 8:
        raise ValueError(f"the GPU kernels need a hidden size of a multiple of 8, not {hidden_size}")
    vectors = hidden_size // 8
    threads = min(_MAX_THREADS, -(-vectors // 32) * 32)
    return {"HIDDEN_SIZE": hidden_size, "VECTORS": -(-vectors // threads)}, threads
