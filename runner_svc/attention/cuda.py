"""Paged attention on a GPU: `plan_*` once per step on the host, `run_*` once per layer on a stream.

A step uses it as follows (arrays are numpy int32 on the host; T positions, R rows):

    attention = CudaAttention(cache, block_tables, num_heads, layers, max_batch=256)
    # A step of decode rows only, padded to a bucket's `batch`:
    words = attention.decode_plan_words(batch)                    # size of its part of the step's packed buffer
    attention.plan_decode(lengths, table_rows, buffer[a : a + words], batch=batch)   # lengths: start + 1
    attention.run_decode(stream, layer, queries, output, plan.data_ptr(), batch)   # capturable; replay with a new plan
    # Rows of several positions (chunks):
    words = attention.prefill_plan_words(T, R)                    # for upper bounds T and R
    attention.plan_prefill(starts, counts, table_rows, query_rows, buffer[b : b + words])
    attention.run_prefill(stream, layer, queries, output, plan.data_ptr(), words)  # capturable too
    # Rows of both kinds, concurrent where the GPU supports it; `batch` or `words` is 0 for a kind without rows:
    all_words = attention.mixed_plan_words(batch, words)
    attention.plan_mixed(decode_rows, prefill_rows, buffer[c : c + all_words], batch, words)
    attention.run_mixed(stream, layer, queries, output, plan.data_ptr(), batch, words)
    # Rows of up to `positions` positions that begin where only the device's counters tell (verify steps):
    words = attention.verify_plan_words(batch, positions)
    attention.plan_verify(verify_rows, buffer[d : d + words], batch, positions)    # of bounds of the counters
    attention.run_verify(stream, layer, queries, output, plan.data_ptr(), batch, positions, counters, drafted)

- `table_rows` are indices into `block_tables`, int32 [rows, W] on the device, whose address must not change.
  `query_rows` are the indices of each row's first query among the step's T.
- queries are [T, num_heads, head_dim] and may be a view of the QKV product: the stride of T is any multiple of 8
  elements. output is [T, num_heads, head_dim] or [T, num_heads * head_dim]. The step's keys and values must already be
  in the cache. Output rows that no plan names are left unchanged. A row of length 0 gives zeros in decode.
- Each plan must begin at a 32-byte boundary of the packed buffer; plans are multiples of 8 words.
- A plan has one part for each distinct window; `run_*` selects its layer's part. Launches share workspaces and
  must therefore be on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.attention.cuda_decode import DecodeKernel, DecodeKernels
from runner_svc.attention.cuda_kernels import AttentionShape, SharedMemory
from runner_svc.attention.cuda_prefill import PREFILL_KINDS, compile_prefill
from runner_svc.attention.mixed_plan import MixedPlanner
from runner_svc.attention.prefill_plan import PrefillPlanner
from runner_svc.attention.softmax_arguments import NO_WINDOW, common_first, common_soft_cap, sinks_of
from runner_svc.attention.verify_plan import VerifyPlanner
from runner_svc.cuda.module import DTYPE_DEFINES
from runner_svc.interface.attention_launcher import DecodeRows, PrefillRows, VerifyRows
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.kv_cache import KVCache


class CudaAttention:
    """Attention of all layers over one cache."""

    prefill_kinds = PREFILL_KINDS

    def __init__(
        self,
        cache: KVCache,
        block_tables: Tensor,
        num_heads: int,
        layers: Sequence[AttentionLayer],
        max_batch: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Compiles the kernels for `cache`, whose layers attend as `layers` say.

        `max_batch`: maximum rows of a decode launch. `dtype`, of queries and output, defaults to the cache's and is
        required for an FP8 cache.

        Raises ValueError for a head size, block size or dtype that the kernels do not support, for layers of which
        only some have a soft cap, and for layers with several first keys.
        """
        dtype = dtype or cache.data.dtype
        _, _, _, block_size, num_kv_heads, head_dim = cache.data.shape
        if dtype not in (torch.bfloat16, torch.float16) or (cache.scales is None and cache.data.dtype is not dtype):
            raise ValueError(f"the GPU kernels do not support {dtype} queries with a {cache.data.dtype} KV cache")
        self._shape = AttentionShape(
            DTYPE_DEFINES[dtype],
            head_dim,
            num_heads,
            num_kv_heads,
            block_size,
            common_soft_cap(layers),
            fp8_cache=cache.scales is not None,
            has_sinks=any(layer.sinks is not None for layer in layers),
            first_key=common_first(layers),
        )
        self._sinks = [sinks_of(layer, num_heads, cache.data.device) for layer in layers]
        self._softmax = [
            (
                head_dim**-0.5 if layer.scale is None else layer.scale,
                layer.soft_cap or 0.0,
                sinks.data_ptr() if self._shape.has_sinks else 0,
            )
            for layer, sinks in zip(layers, self._sinks, strict=True)
        ]
        self._layers = [(layer[0].data_ptr(), layer[1].data_ptr()) for layer in cache.data]
        self._cache_scales = cache.scale_addresses()
        self._tables, self._table_stride = block_tables.data_ptr(), block_tables.stride(0)
        self._owned = (cache, block_tables)  # their memory must outlive the pointers
        self._windows = tuple(dict.fromkeys(layer.window for layer in layers))
        self._window_of_layer = [self._windows.index(layer.window) for layer in layers]
        self._max_batch = max_batch
        self._compile(cache, block_tables)

    def _compile(self, cache: KVCache, block_tables: Tensor) -> None:
        import cupy

        attributes = cupy.cuda.Device().attributes
        shared = SharedMemory(
            attributes["MaxSharedMemoryPerMultiprocessor"], attributes["MaxSharedMemoryPerBlockOptin"]
        )
        self._prefill = compile_prefill(self._shape, cache, block_tables, self._softmax, self.prefill_kinds)
        self._prefill_planners = [
            PrefillPlanner(self._prefill.tile_rows, window, self._prefill.grid) for window in self._windows
        ]
        self._capacity = block_tables.shape[1] * self._shape.block_size
        self._compile_decode = self._decode_kernels(shared, cache.data.device)
        self._decode = self._compile_decode(beside=self._prefill.runs_beside_decode)
        self._verify: dict[int, DecodeKernels] = {}

    def _decode_kernels(self, shared: SharedMemory, device: torch.device) -> Callable[..., DecodeKernels]:
        """Returns a function of `positions` and `beside` that compiles `DecodeKernels`."""
        return partial(DecodeKernels, self._shape, shared, self._windows, self._max_batch, device)

    def _verifying(self, positions: int) -> DecodeKernels:
        """Returns the kernels for rows of `positions` positions, compiled at their first use."""
        kernels = self._verify.get(positions)
        if kernels is None:
            beside = positions == 1 and self._prefill.runs_beside_decode
            kernels = self._verify[positions] = self._compile_decode(positions=positions, beside=beside)
        return kernels

    def decode_plan_words(self, batch: int) -> int:
        """Returns the size of a decode plan for `batch` rows, in int32 words."""
        return self._decode.of(batch).words(batch)

    def plan_decode(
        self,
        lengths: NDArray[np.int32],
        table_rows: NDArray[np.int32],
        plan: NDArray[np.int32],
        query_rows: NDArray[np.int32] | None = None,
        batch: int | None = None,
    ) -> None:
        """Fills `plan` [decode_plan_words(B)] for N <= B rows of `lengths` positions, the one being decoded included.

        `batch` is B and defaults to N. Row b's query is `query_rows[b]`, by default b. A table row must name a valid
        block even for a length of 0. Padding rows should be left out: their output is then left unchanged. Raises
        ValueError for layers with a first key, which only verify rows have.
        """
        self._refuse_first_key()
        if query_rows is None:
            query_rows = np.arange(len(lengths), dtype=np.int32)
        batch = batch or len(lengths)
        planners = self._decode.of(batch).planners(batch)
        for planner, part in zip(planners, plan.reshape(len(planners), -1), strict=True):
            planner.write(lengths, table_rows, query_rows, part)

    def _refuse_first_key(self) -> None:
        if self._shape.first_key:
            raise ValueError("only attention of verify rows hides the keys before a first one")

    def run_decode(self, stream: int, layer: int, queries: Tensor, output: Tensor, plan: int, batch: int) -> None:
        """Launches a layer's decode attention; `plan` is the device address of a plan made for `batch` rows."""
        self._launch_decode(self._decode, self._decode.of(batch), stream, layer, queries, output, plan, batch)

    def verify_plan_words(self, batch: int, positions: int) -> int:
        """Returns the size of a plan for `batch` rows of up to `positions` positions, in int32 words.

        The first call for a number of positions compiles its kernels.
        """
        return self._verifying(positions).of(batch).words(batch)

    def plan_verify(self, rows: VerifyRows, plan: NDArray[np.int32], batch: int, positions: int) -> None:
        """Fills `plan` [verify_plan_words(batch, positions)] for N <= batch rows.

        Row b's queries are `positions` adjacent ones from `rows.query_rows[b]` on. Padding rows should be left out.
        Raises ValueError if a row's lower bound exceeds its upper bound.
        """
        if not len(rows.lowers):
            plan.fill(0)  # no work for any block
            return
        planners = self._verifying(positions).of(batch).planners(batch)
        for line, part in zip(planners, plan.reshape(len(planners), -1), strict=True):
            VerifyPlanner(line, positions, self._capacity).write(rows, part)

    def run_verify(
        self,
        stream: int,
        layer: int,
        queries: Tensor,
        output: Tensor,
        plan: int,
        batch: int,
        positions: int,
        counters: Tensor,
        drafted: Tensor | None,
    ) -> None:
        """Launches a layer's attention of verify rows; `plan` is the device address of their plan.

        `counters` int32 [rows of the block tables]: each row's tokens up to its first query's position, included.
        `drafted` int32 [batch], in the order of the plan's rows: queries after the first that are present, fewer than
        `positions`; None for none. The outputs of absent queries have no meaning. Both tensors must be written before
        the step's inputs are gathered: the kernel reads them before it waits for its predecessors.
        """
        kernels = self._verifying(positions)
        kernel = kernels.of(batch)
        self._launch_decode(kernels, kernel, stream, layer, queries, output, plan, batch, counters, drafted)

    def _launch_decode(
        self,
        kernels: DecodeKernels,
        decode: DecodeKernel,
        stream: int,
        layer: int,
        queries: Tensor,
        output: Tensor,
        plan: int,
        batch: int,
        counters: Tensor | None = None,
        drafted: Tensor | None = None,
    ) -> None:
        part = self._window_of_layer[layer]
        known = () if counters is None else (counters.data_ptr(), 0 if drafted is None else drafted.data_ptr())
        decode.kernel(
            stream,
            decode.grid,
            queries.data_ptr(),
            queries.stride(0),
            output.data_ptr(),
            output.stride(0),
            *self._layers[layer],
            self._tables,
            self._table_stride,
            plan + 4 * part * decode.planners(batch)[part].words,
            batch,
            self._cache_scales[layer],
            *self._softmax[layer],
            *kernels.workspace,
            *known,
            *((self._windows[part] or NO_WINDOW,) if known else ()),
        )

    def prefill_plan_words(self, num_tokens: int, num_rows: int) -> int:
        """Returns the maximum size, in int32 words, of a prefill plan for `num_rows` rows of `num_tokens` in total."""
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

        Row r's positions begin at `starts[r]`, its queries at `query_rows[r]`. The arrays may be empty. Raises
        ValueError for layers with a first key, which only verify rows have.
        """
        self._refuse_first_key()
        for planner, part in zip(self._prefill_planners, plan.reshape(len(self._windows), -1), strict=True):
            planner.write(starts, counts, table_rows, query_rows, part)

    def run_prefill(self, stream: int, layer: int, queries: Tensor, output: Tensor, plan: int, plan_words: int) -> None:
        """Launches a layer's prefill attention; `plan` is the device address of a plan of `plan_words` words."""
        self._launch_prefill(stream, layer, queries, output, plan, plan_words, beside=False)

    def _launch_prefill(
        self, stream: int, layer: int, queries: Tensor, output: Tensor, plan: int, plan_words: int, beside: bool
    ) -> None:
        part = self._window_of_layer[layer]
        address = plan + 4 * part * (plan_words // len(self._windows))
        self._prefill(stream, layer, queries, output, address, self._windows[part] or NO_WINDOW, beside)

    def mixed_plan_words(self, batch: int, prefill_words: int) -> int:
        """Returns the int32 words of a plan for at most `batch` decode rows and a prefill plan; either may be 0."""
        return self._mixed_decode_words(batch, prefill_words) + prefill_words

    def plan_mixed(
        self,
        decode: DecodeRows | VerifyRows,
        prefill: PrefillRows,
        plan: NDArray[np.int32],
        batch: int,
        prefill_words: int,
    ) -> None:
        """Fills `plan` [mixed_plan_words(batch, prefill_words)]. Either kind may have no rows.

        Verify rows have one position; they are launched with counters.
        """
        kernels = self._verifying(1) if isinstance(decode, VerifyRows) else self._decode
        decode_words = self._mixed_decode_words(batch, prefill_words)
        decode_plan, prefill_plan = plan[:decode_words], plan[decode_words:]
        beside = kernels.beside if batch and prefill_words else None
        if beside is not None:
            parts = (each.reshape(len(self._windows), -1) for each in (decode_plan, prefill_plan))
            for line, second, *plans in zip(beside.planners(batch), self._prefill_planners, *parts, strict=True):
                verify = VerifyPlanner(line, 1, self._capacity)
                rows = verify.covered(decode) if isinstance(decode, VerifyRows) else decode
                MixedPlanner(line, second, self._shape.num_heads, self._shape.fp8_cache).write(rows, prefill, *plans)
            return
        if isinstance(decode, VerifyRows):
            self.plan_verify(decode, decode_plan, batch, 1)
        elif len(decode.lengths):
            self.plan_decode(decode.lengths, decode.table_rows, decode_plan, decode.query_rows, batch)
        else:
            decode_plan.fill(0)  # no work for any block
        if prefill_words:
            self.plan_prefill(prefill.starts, prefill.counts, prefill.table_rows, prefill.query_rows, prefill_plan)

    def run_mixed(
        self,
        stream: int,
        layer: int,
        queries: Tensor,
        output: Tensor,
        plan: int,
        batch: int,
        prefill_words: int,
        counters: Tensor | None = None,
    ) -> None:
        """Launches a layer's decode and prefill attention; `plan` is the device address of the plan.

        `counters` as in `run_verify`, for a plan of verify rows.
        """
        kernels = self._decode if counters is None else self._verifying(1)
        prefill_plan = plan + 4 * self._mixed_decode_words(batch, prefill_words)
        beside = kernels.beside if batch and prefill_words else None
        if batch:
            kernel = beside or kernels.of(batch)
            self._launch_decode(kernels, kernel, stream, layer, queries, output, plan, batch, counters)
        if prefill_words:
            self._launch_prefill(stream, layer, queries, output, prefill_plan, prefill_words, beside is not None)

    def _mixed_decode_words(self, batch: int, prefill_words: int) -> int:
        """Returns the words of a mixed plan's decode part; those of verify rows of one position are as many."""
        if not batch:
            return 0
        beside = self._decode.beside if prefill_words else None
        return (beside or self._decode.of(batch)).words(batch)
