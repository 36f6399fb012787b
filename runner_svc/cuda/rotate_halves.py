"""Launches kernels/rotate_halves.cu: rotates queries and keys with given cosines and sines."""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load

_THREADS = 128


class RotateHalves:
    """The rotation of one number of query heads, of key-value heads, and one head size."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Raises ValueError for a head size that does not split into vectors of 16 bytes."""
        if head_dim % 16:
            raise ValueError(f"the GPU kernels rotate heads of a multiple of 16 elements, not {head_dim}")
        defines: dict[str, int | str] = {
            "SCALAR": DTYPE_DEFINES[dtype],
            "HEADS": num_heads,
            "KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
        }
        self._vectors = (num_heads + num_kv_heads) * head_dim // 16
        self._kernel = Kernel(load("rotate_halves", defines), "rotate_halves", "PqqPqqPPPPi", _THREADS)

    def __call__(
        self,
        stream: int,
        queries: Tensor,
        keys: Tensor,
        cosines: Tensor,
        sines: Tensor,
        out_queries: Tensor,
        out_keys: Tensor,
    ) -> None:
        """Fills both outputs [T, heads, head_dim], contiguous, from inputs of that shape with elements side by side.

        `cosines` and `sines` are [T, head_dim], contiguous, in the type of the others.
        """
        num_tokens = len(queries)
        self._kernel(
            stream,
            -(-num_tokens * self._vectors // _THREADS),
            queries.data_ptr(),
            queries.stride(0),
            queries.stride(1),
            keys.data_ptr(),
            keys.stride(0),
            keys.stride(1),
            cosines.data_ptr(),
            sines.data_ptr(),
            out_queries.data_ptr(),
            out_keys.data_ptr(),
            num_tokens,
        )
