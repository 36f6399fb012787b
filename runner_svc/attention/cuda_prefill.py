"""The two prefill kernels behind one signature: wgmma and TMA on Hopper, mma.sync elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from runner_svc.attention.cuda_kernels import AttentionShape, HopperPrefillVariant, PrefillVariant
from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import is_hopper, load, num_multiprocessors
from runner_svc.cuda.tensor_map import bytes_map, heads_map
from runner_svc.interface.kv_cache import KVCache

# Each combination of the queries' address, number and stride needs its own map; this many are cached.
_MAX_QUERY_MAPS = 4096


class Prefill(Protocol):
    """A compiled prefill kernel over one cache."""

    tile_rows: int
    """Queries per tile of its plans."""
    grid: int
    """Thread blocks that run at once."""
    runs_beside_decode: bool

    def __call__(
        self, stream: int, layer: int, queries: Tensor, output: Tensor, plan: int, window: int, beside: bool = False
    ) -> None:
        """Launches one layer; `plan` is the device address of the plan.

        With `beside`, it runs concurrently with the decode kernel launched just before.
        """


class PortablePrefill:
    """The kernel of kernels/paged_prefill.cu, for any GPU."""

    runs_beside_decode = False
    source = "paged_prefill"
    variant_of = PrefillVariant

    def __init__(
        self, shape: AttentionShape, cache: KVCache, block_tables: Tensor, softmax: Sequence[tuple[float, float, int]]
    ) -> None:
        variant = self.variant_of(shape)
        self.tile_rows = variant.tile_rows
        self._kernel = Kernel(
            load(self.source, variant.defines),
            self.source,
            # queries, stride, output, stride, keys, values, tables, stride, plan, window, cache scales, scale, cap,
            # sinks
            "PqPqPPPiPiPffP",
            variant.threads,
            shared_bytes=variant.shared_bytes,
        )
        self.grid = num_multiprocessors() * variant.blocks
        self._layers = [(layer[0].data_ptr(), layer[1].data_ptr()) for layer in cache.data]
        self._cache_scales = cache.scale_addresses()
        self._tables = (block_tables.data_ptr(), block_tables.stride(0))
        self._softmax = softmax

    def __call__(
        self, stream: int, layer: int, queries: Tensor, output: Tensor, plan: int, window: int, beside: bool = False
    ) -> None:
        self._kernel(
            stream,
            self.grid,
            queries.data_ptr(),
            queries.stride(0),
            output.data_ptr(),
            output.stride(0),
            *self._layers[layer],
            *self._tables,
            plan,
            window,
            self._cache_scales[layer],
            *self._softmax[layer],
        )


class HopperPrefill:
    """The kernel of kernels/paged_prefill_hopper.cu, with its tensor maps."""

    runs_beside_decode = True
    variant_of = HopperPrefillVariant

    def __init__(
        self, shape: AttentionShape, cache: KVCache, block_tables: Tensor, softmax: Sequence[tuple[float, float, int]]
    ) -> None:
        variant = self.variant_of(shape)
        self.tile_rows = variant.tile_rows
        module = load("paged_prefill_hopper", variant.defines)
        # The first runs alone, the second beside the kernel launched before it.
        self._kernels = [
            Kernel(
                module,
                "paged_prefill_hopper",
                # maps of queries, keys and values; values, output, stride, tables, stride, plan, window, cache scales,
                # scale, cap, sinks
                "128s128s128sPPqPiPiPffP",
                variant.threads,
                shared_bytes=variant.shared_bytes,
                overlap=overlap,
            )
            for overlap in (False, True)
        ]
        self.grid = num_multiprocessors()
        self._num_heads, self._head_dim = shape.num_heads, shape.head_dim
        self._planes = variant.copied_planes
        positions = cache.data.shape[2] * shape.block_size
        row_stride = shape.num_kv_heads * shape.head_dim

        def map_of(half: Tensor, planes: int) -> bytes:
            if shape.fp8_cache:
                return bytes_map(half.data_ptr(), shape.num_kv_heads, shape.head_dim, positions, variant.copied_keys)
            box = (variant.copied_keys, planes)
            return heads_map(half.data_ptr(), shape.num_kv_heads, shape.head_dim, positions, row_stride, box)

        self._layers = [
            (map_of(keys, 1), map_of(values, self._planes), values.data_ptr()) for keys, values in cache.data
        ]
        self._cache_scales = cache.scale_addresses()
        self._tables = (block_tables.data_ptr(), block_tables.stride(0))
        self._softmax = softmax
        self._query_map = lru_cache(_MAX_QUERY_MAPS)(self._make_query_map)

    def _make_query_map(self, address: int, rows: int, row_stride: int) -> bytes:
        box = (self.tile_rows, self._planes)
        return heads_map(address, self._num_heads, self._head_dim, rows, row_stride, box)

    def __call__(
        self, stream: int, layer: int, queries: Tensor, output: Tensor, plan: int, window: int, beside: bool = False
    ) -> None:
        self._kernels[beside](
            stream,
            self.grid,
            self._query_map(queries.data_ptr(), queries.shape[0], queries.stride(0)),
            *self._layers[layer],
            output.data_ptr(),
            output.stride(0),
            *self._tables,
            plan,
            window,
            self._cache_scales[layer],
            *self._softmax[layer],
        )


PREFILL_KINDS = (HopperPrefill, PortablePrefill)
"""The kernels for Hopper and for any GPU."""


def compile_prefill(
    shape: AttentionShape,
    cache: KVCache,
    block_tables: Tensor,
    softmax: Sequence[tuple[float, float, int]],
    kinds: tuple[type[HopperPrefill], type[PortablePrefill]] = PREFILL_KINDS,
) -> Prefill:
    """Compiles the fastest kernel that the GPU, the head size and the cache's dtype allow.

    `softmax` has each layer's scale, soft cap and address of sinks. `kinds` are the kernels for Hopper and for any GPU.
    """
    hopper, portable = kinds
    kind = hopper if is_hopper() and HopperPrefillVariant.fits(shape) else portable
    return kind(shape, cache, block_tables, softmax)
