"""Launches kernels/embed.cu: embeddings of a step's tokens, as the input of the first product."""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load
from runner_svc.interface.products.skinny_launchers import ScaledRows, TileSums

_MAX_THREADS = 512


class Embed:
    """Embedding kernel of one model."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, *, overlap: bool = False) -> None:
        """Raises ValueError if rows do not split into vectors of 16 bytes."""
        if hidden_size % 8:
            raise ValueError(f"the GPU kernels need a hidden size of a multiple of 8, not {hidden_size}")
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
        sums: TileSums,
    ) -> ScaledRows:
        """Fills `residual` with the embeddings of `tokens`, int32 [T], and `out` with residual * norm_weight.

        `residual` and `out` are [T, hidden_size]; the first row of `sums.squares` is filled.
        Returns `out` as the input of the first product.
        """
        self._kernel(
            stream,
            len(tokens),
            tokens.data_ptr(),
            embeddings.data_ptr(),
            norm_weight.data_ptr(),
            residual.data_ptr(),
            out.data_ptr(),
            sums.squares.data_ptr(),
        )
        return ScaledRows(out, sums.squares[:1])
