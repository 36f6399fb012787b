"""Launches kernels/residual_norm.cu: norms other than RMSNorm, norms of what is added, and factors of it."""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load
from runner_svc.cuda.norm import row_defines
from runner_svc.model.families.description import NormKind

KINDS = {NormKind.RMS: 0, NormKind.RMS_PLUS_ONE: 1, NormKind.LAYER: 2}
"""The kernel's KIND."""


_Variant = tuple[bool, bool, bool]
"""Whether a kernel adds, norms what it adds, and writes a norm."""
_VARIANTS: list[_Variant] = [(False, False, True), (True, False, True)]
_POST_VARIANTS: list[_Variant] = [*_VARIANTS, (True, True, True), (True, True, False)]


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
        row, threads = row_defines(hidden_size)
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
            residual.data_ptr() if residual is not None else 0,
            weight.data_ptr() if weight is not None else 0,
            out.data_ptr(),
            hidden.stride(0),
            self._eps,
            post_weight.data_ptr() if post_weight is not None else 0,
        )
