"""Paged attention on a GPU in the canonical order: a query's bits depend on it and on the keys that it sees alone.

Decode, prefill, mixed and verify steps give the same bits for a query, whatever the batch, the chunk, the split and the
kernel. docs/determinism.md has the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from runner_svc.attention.canonical_gpu.kernels import (
    CanonicalDecodeKernels,
    CanonicalHopperPrefill,
    CanonicalPortablePrefill,
)
from runner_svc.attention.canonical_gpu.variants import MOST_HEAD_DIM
from runner_svc.attention.cuda import CudaAttention
from runner_svc.attention.cuda_kernels import SharedMemory
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.kv_cache import KVCache


class CanonicalGpuAttention(CudaAttention):
    """`CudaAttention` in the canonical order, with the same methods and plans of its own sizes."""

    prefill_kinds = (CanonicalHopperPrefill, CanonicalPortablePrefill)

    def __init__(
        self,
        cache: KVCache,
        block_tables: Tensor,
        num_heads: int,
        layers: Sequence[AttentionLayer],
        max_batch: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Compiles the kernels; see `CudaAttention`.

        Raises ValueError also for a dtype other than bfloat16, for heads of more than 128 elements and for a layer
        whose scale is not positive.
        """
        dtype = dtype or cache.data.dtype
        head_dim = cache.data.shape[-1]
        if dtype is not torch.bfloat16:
            raise ValueError(f"attention in the canonical order is made for bfloat16, not for {dtype}")
        if head_dim > MOST_HEAD_DIM:
            raise ValueError(
                f"attention in the canonical order does not support heads of {head_dim} elements: "
                f"at most {MOST_HEAD_DIM}"
            )
        if any(layer.scale is not None and layer.scale <= 0 for layer in layers):
            raise ValueError("attention in the canonical order does not support a scale of scores that is not positive")
        super().__init__(cache, block_tables, num_heads, layers, max_batch, dtype)

    def _decode_kernels(self, shared: SharedMemory, device: torch.device) -> Callable[..., CanonicalDecodeKernels]:
        return partial(
            CanonicalDecodeKernels, self._shape, shared, self._windows, self._max_batch, device, self._capacity
        )
