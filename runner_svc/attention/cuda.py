"""Paged attention on a GPU: `plan_*` once a step on the host, `run_*` once a layer on a stream.

How a step uses it (arrays are numpy int32 on the host; T positions, R rows):

    attention = CudaAttention(cache, block_tables, num_heads, windows, max_batch=256)
    # A step of decode rows only, padded to a bucket's `batch`:
    words = attention.decode_plan_words(batch)                    # its part of the step's packed buffer
    attention.plan_decode(lengths, table_rows, buffer[a : a + words], batch=batch)   # lengths: start + 1
    attention.run_decode(stream, layer, queries, output, plan.data_ptr(), batch)   # capturable; replay with a new plan
    # Rows of several positions (chunks). Rows of one position in a mixed step go through decode, with `query_rows`:
    words = attention.prefill_plan_words(T, R)                    # for upper bounds T and R
    attention.plan_prefill(starts, counts, table_rows, query_rows, buffer[b : b + words])
    attention.run_prefill(stream, layer, queries, output, plan.data_ptr(), words)  # capturable too

- `table_rows` index `block_tables`, int32 [rows, W] on the device, which must stay where it is. `query_rows` index the
  first query of each row among the step's T.
- queries are [T, num_heads, head_dim] and may be a view of the QKV product: the stride of T is free, a multiple of 8
  elements. output is [T, num_heads, head_dim] or [T, num_heads * head_dim]. Keys and values of the step must be in the
  cache before. Rows that no plan names keep what the output held. A row of length 0 gives zeros in decode.
- The packed buffer must be 32-byte aligned where a plan begins: plans are multiples of 8 words.
- A plan holds one part for each distinct window, and `run_*` finds its layer's. The workspace is shared by all
  launches, which therefore must follow one another on one stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import cupy
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.attention.cuda_kernels import AttentionShape, DecodeVariant, SharedMemory
from runner_svc.attention.cuda_prefill import compile_prefill
from runner_svc.attention.decode_plan import DecodePlanner
from runner_svc.attention.prefill_plan import PrefillPlanner
from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load, num_multiprocessors
from runner_svc.kv_cache import KVCache

_NO_WINDOW = 2**30
# Batches up to this use one large block a multiprocessor.
_SMALL_BATCH = 16


class CudaAttention:
    """Attention of all layers over one cache."""

    def __init__(
        self,
        cache: KVCache,
        block_tables: Tensor,
        num_heads: int,
        windows: Sequence[int | None],
        max_batch: int,
        dtype: torch.dtype | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """`max_batch`: most rows of a decode launch. `dtype`, of queries and output, is the cache's unless given, as it
        must be for an FP8 cache. `scale` of the scores is 1 / sqrt(head_dim) unless given.

        Raises ValueError for a head size, block size or dtype that the kernels lack.
        """
        dtype = dtype or cache.data.dtype
        _, _, _, block_size, num_kv_heads, head_dim = cache.data.shape
        if dtype not in (torch.bfloat16, torch.float16) or (cache.scales is None and cache.data.dtype is not dtype):
            raise ValueError(f"queries of {dtype} on a KV cache of {cache.data.dtype}: the GPU kernels lack that")
        self._shape = AttentionShape(
            DTYPE_DEFINES[dtype], head_dim, num_heads, num_kv_heads, block_size, soft_cap, cache.scales is not None
        )
        self._scale = head_dim**-0.5 if scale is None else scale
        self._soft_cap = soft_cap or 0.0
        self._layers = [(layer[0].data_ptr(), layer[1].data_ptr()) for layer in cache.data]
        self._cache_scales = cache.scale_addresses()
        self._tables, self._table_stride = block_tables.data_ptr(), block_tables.stride(0)
        self._owned = (cache, block_tables)  # their memory must outlive the pointers
        self._windows = tuple(dict.fromkeys(windows))
        self._window_of_layer = [self._windows.index(window) for window in windows]
        self._max_batch = max_batch
        self._compile(cache, block_tables)

    def _compile(self, cache: KVCache, block_tables: Tensor) -> None:
        device = cache.data.device
        attributes = cupy.cuda.Device().attributes
        shared = SharedMemory(
            attributes["MaxSharedMemoryPerMultiprocessor"], attributes["MaxSharedMemoryPerBlockOptin"]
        )
        self._decode_variants = {small: DecodeVariant.choose(self._shape, shared, small) for small in (True, False)}
        self._decode_kernels = {
            small: Kernel(
                load("paged_decode", variant.defines),
                "paged_decode",
                # queries, stride, output, stride, keys, values, tables, stride, plan, batch, cache scales, scale, cap,
                # workspace
                "PqPqPPPiPiPffPPP",
                variant.threads,
                shared_bytes=variant.shared_bytes,
                overlap=True,
            )
            for small, variant in self._decode_variants.items()
        }
        variant = max(self._decode_variants.values(), key=self._grid)
        slots = 2 * self._grid(variant)
        self._partial_sums = torch.empty(slots * variant.heads * self._shape.head_dim, device=device)
        self._partial_stats = torch.empty(slots * variant.heads * 2, device=device)
        self._arrivals = torch.zeros(self._max_batch * variant.units, dtype=torch.int32, device=device)
        self._workspace = (
            self._partial_sums.data_ptr(),
            self._partial_stats.data_ptr(),
            self._arrivals.data_ptr(),
        )
        self._prefill = compile_prefill(self._shape, cache, block_tables, self._scale, self._soft_cap)
        self._prefill_planners = [PrefillPlanner(self._prefill.tile_rows, window) for window in self._windows]
        self._decode_planners: dict[int, list[DecodePlanner]] = {}

    @staticmethod
    def _grid(variant: DecodeVariant) -> int:
        return num_multiprocessors() * variant.blocks

    def _planners(self, batch: int) -> list[DecodePlanner]:
        """One for each window; made when a batch size is first met."""
        planners = self._decode_planners.get(batch)
        if planners is None:
            if batch > self._max_batch:
                raise ValueError(f"a decode batch of {batch} rows, made for {self._max_batch}")
            variant = self._decode_variants[batch <= _SMALL_BATCH]
            grid = self._grid(variant)
            planners = [
                DecodePlanner(batch, grid, variant.min_cost, variant.units, variant.end_cost, window)
                for window in self._windows
            ]
            self._decode_planners[batch] = planners
        return planners

    def decode_plan_words(self, batch: int) -> int:
        """int32 words of a decode plan for `batch` rows."""
        return sum(planner.words for planner in self._planners(batch))

    def plan_decode(
        self,
        lengths: NDArray[np.int32],
        table_rows: NDArray[np.int32],
        plan: NDArray[np.int32],
        query_rows: NDArray[np.int32] | None = None,
        batch: int | None = None,
    ) -> None:
        """Fills `plan` [decode_plan_words(B)] for N <= B rows of `lengths` positions, the one being decoded included.

        `batch` is B, or N. Row b's query is `query_rows[b]`, or b. A table row must name a valid block even for a
        length of 0. Rows that a batch is padded with should be left out: their output stays as it was.
        """
        if query_rows is None:
            query_rows = np.arange(len(lengths), dtype=np.int32)
        offset = 0
        for planner in self._planners(batch or len(lengths)):
            planner.write(lengths, table_rows, query_rows, plan[offset : offset + planner.words])
            offset += planner.words

    def run_decode(self, stream: int, layer: int, queries: Tensor, output: Tensor, plan: int, batch: int) -> None:
        """Launches a layer's decode attention with the plan at this device address, made for `batch` rows."""
        part = self._window_of_layer[layer]
        planners = self._planners(batch)
        self._decode_kernels[batch <= _SMALL_BATCH](
            stream,
            planners[part].grid,
            queries.data_ptr(),
            queries.stride(0),
            output.data_ptr(),
            output.stride(0),
            *self._layers[layer],
            self._tables,
            self._table_stride,
            plan + 4 * part * planners[part].words,
            batch,
            self._cache_scales[layer],
            self._scale,
            self._soft_cap,
            *self._workspace,
        )

    def prefill_plan_words(self, num_tokens: int, num_rows: int) -> int:
        """Most int32 words of a prefill plan for `num_rows` rows of together `num_tokens` positions."""
        return sum(planner.max_words(num_tokens, num_rows) for planner in self._prefill_planners)

    def plan_prefill(
        self,
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        table_rows: NDArray[np.int32],
        query_rows: NDArray[np.int32],
        plan: NDArray[np.int32],
    ) -> None:
        """Fills `plan` [prefill_plan_words(T, R) for some T and R at least the step's] for rows of `counts` positions.

        Row r's positions begin at `starts[r]`, its queries at `query_rows[r]`. No rows at all are fine.
        """
        for planner, part in zip(self._prefill_planners, plan.reshape(len(self._windows), -1), strict=True):
            planner.write(starts, counts, table_rows, query_rows, part)

    def run_prefill(self, stream: int, layer: int, queries: Tensor, output: Tensor, plan: int, plan_words: int) -> None:
        """Launches a layer's prefill attention with the plan of `plan_words` words at this device address."""
        part = self._window_of_layer[layer]
        address = plan + 4 * part * (plan_words // len(self._windows))
        self._prefill(stream, layer, queries, output, address, self._windows[part] or _NO_WINDOW)
