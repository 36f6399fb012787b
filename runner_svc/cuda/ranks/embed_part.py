"""Launches kernels/embed_part.cu: embeddings from a rank's part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load

_MAX_THREADS = 512


class EmbedPart:
    """Embedding kernel of one model's rank."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, *, overlap: bool = False) -> None:
        """Raises ValueError if rows do not split into vectors of 16 bytes."""
        if hidden_size % 8:
            raise ValueError(f"the GPU kernels need a hidden size of a multiple of 8, not {hidden_size}")
        threads = min(_MAX_THREADS, -(-hidden_size // 8 // 32) * 32)
        defines: dict[str, int | str] = {"SCALAR": DTYPE_DEFINES[dtype], "WIDTH": hidden_size}
        self._kernel = Kernel(load("embed_part", defines), "embed_part", "PPPii", threads, overlap=overlap)

    def __call__(self, stream: int, tokens: Tensor, embeddings: Tensor, begin: int, out: Tensor) -> None:
        """Fills `out` [T, hidden_size] from `embeddings`, those of tokens from `begin` on; others' rows are zeros.

        `tokens` is int32 [T].
        """
        addresses = (tokens.data_ptr(), embeddings.data_ptr(), out.data_ptr())
        self._kernel(stream, len(tokens), *addresses, begin, len(embeddings))
