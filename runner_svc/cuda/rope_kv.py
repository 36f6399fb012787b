"""Launches kernels/rope_kv_write.cu: QK-norm, rotary embedding and the write into the paged cache."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import DTYPE_DEFINES, load
from runner_svc.interface.products.linear_launchers import Scaling
from runner_svc.model.families.description import QkNorm

QK_NORMS = {QkNorm.NONE: 0, QkNorm.HEAD: 1, QkNorm.PROJECTION: 2, QkNorm.LAYER_HEAD: 3}
"""The kernel's QK_NORM."""

_MAX_THREADS = 512


class RopeKvWrite:
    """One model's kernel between QKV product and attention; `rotary_dim` is 0 for layers without rotary embedding."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        dtype: torch.dtype,
        eps: float = 0.0,
        qk_norm: QkNorm = QkNorm.NONE,
        plus_one: bool = False,
        fp8_cache: bool = False,
        overlap: bool = False,
        canonical: bool = False,
    ) -> None:
        """`plus_one`: factors of the norm of each head are 1 + weight. `canonical`: nothing is contracted (`load`).

        Raises ValueError for unsupported dimensions.
        """
        vector, lanes = _vectors(head_dim, rotary_dim)
        threads = min(_MAX_THREADS, -(-(num_heads + 2 * num_kv_heads) * lanes // 32) * 32)
        defines: dict[str, int | str] = {
            "SCALAR": DTYPE_DEFINES[dtype],
            "HEADS": num_heads,
            "KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "ROTARY_DIM": rotary_dim,
            "VECTOR": vector,
            "LANES": lanes,
            "QK_NORM": QK_NORMS[qk_norm],
            **({"QK_PLUS_ONE": 1} if plus_one else {}),
            "FP8_CACHE": int(fp8_cache),
            **({"CANONICAL": 1} if canonical else {}),
        }
        self._eps, self._threads, self._overlap = eps, threads, overlap
        self._defines = defines
        self._kernel = lru_cache(None)(self._compile)
        self._kernel(False)
        self.scales = qk_norm is not QkNorm.PROJECTION
        """Whether `qkv` may be sums that it scales."""

    def __call__(
        self,
        stream: int,
        qkv: Tensor,
        queries: Tensor,
        cache: Tensor,
        rotations: Tensor,
        rotation_rows: Tensor,
        slot_mapping: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        cache_scales: Tensor | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        """Writes rotated queries to `queries`, keys and values to `cache`.

        `qkv`: [T, (num_heads + 2 * num_kv_heads) * head_dim], contiguous. `queries`: [T, num_heads * head_dim] with any
        row stride; the first columns of `qkv` may be passed to rotate in place. `cache`: the layer's [2, num_blocks +
        1, block_size, num_kv_heads, head_dim], float8_e4m3fn with fp8_cache. `rotations`: float32 [rows, rotary_dim],
        cosines of the pairs, then sines. `rotation_rows`, `slot_mapping`: int32 [T]. `cache_scales`: float32
        [2, num_kv_heads], only with fp8_cache. `q_norm`, `k_norm`: as `QkNorm` says. `scaling`: of `qkv`,
        if those are sums.
        """
        self._kernel(scaling is not None)(
            stream,
            qkv.shape[0],
            qkv.data_ptr(),
            queries.data_ptr(),
            cache.data_ptr(),
            rotations.data_ptr(),
            rotation_rows.data_ptr(),
            slot_mapping.data_ptr(),
            address_of(q_norm),
            address_of(k_norm),
            address_of(cache_scales),
            address_of(scaling.factors if scaling is not None else None),
            address_of(scaling.scales if scaling is not None else None),
            queries.stride(0),
            cache.stride(0),
            self._eps,
        )

    def _compile(self, scaled: bool) -> Kernel:
        module = load("rope_kv_write", self._defines | ({"SCALED": 1} if scaled else {}))
        return Kernel(module, "rope_kv_write", "PPPPPPPPPPPqqf", self._threads, overlap=self._overlap)


def _vectors(head_dim: int, rotary_dim: int) -> tuple[int, int]:
    """Returns the elements per vector and the lanes per head."""
    vector = math.gcd(8, rotary_dim // 2, (head_dim - rotary_dim) // 2)
    lanes = 1
    while lanes * 2 * vector < head_dim:
        lanes *= 2
    if head_dim % 2 or rotary_dim % 2 or lanes > 32:
        raise ValueError(f"the GPU kernels do not support heads of {head_dim} dimensions of which {rotary_dim} rotate")
    return vector, lanes
