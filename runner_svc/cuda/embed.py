"""Embeddings of a step's tokens, as the input of the first product; see `kernels/embed.cu`."""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load
from runner_svc.interface.skinny_launchers import ScaledRows

_MAX_THREADS = 512


class Embed:
    """Of one model."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, *, overlap: bool = False) -> None:
        """Raises ValueError when rows do not split into vectors of 16 bytes."""
        if hidden_size % 8:
            raise ValueError(f"embeddings on a GPU need a hidden size that is a multiple of 8, not {hidden_size}")
        threads = min(_MAX_THREADS, -(-hidden_size // 8 // 32) * 32)
        defines: dict[str, int | str] = {"SCALAR": DTYPE_DEFINES[dtype], "WIDTH": hidden_size}
        self._kernel = Kernel(load("embed", defines), "embed", "PPPPPP", threads, overlap=overlap)

    def __call__(
        self,
        stream: int,
        tokens: Tensor,
        embeddings: Tensor,
        norm_weight: Tensor,
        residual: Tensor,
        out: Tensor,
        squares: Tensor,
    ) -> ScaledRows:
        """`residual` = the embeddings of `tokens`, int32 [T]; `out` = residual * norm_weight; both [T, hidden_size].

        `squares` float32 [n, MAX_ROWS], of which one row is used. Returns `out` as the input of the first product.
        """
        self._kernel(
            stream,
            len(tokens),
            tokens.data_ptr(),
            embeddings.data_ptr(),
            norm_weight.data_ptr(),
            residual.data_ptr(),
            out.data_ptr(),
            squares.data_ptr(),
        )
        return ScaledRows(out, squares[:1])
