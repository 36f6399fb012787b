"""Paged attention on a CPU, in torch: gathered keys and values through `scaled_dot_product_attention`.

Split as flashinfer is: `plan` once a step works out which positions each query reads (the indices are the same for
all layers of one window), `run` once a layer only gathers and multiplies. Notable choices:

- Rows of one position (decode) are vectorised over the batch, in groups of similar length so that one long sequence
  doesn't pad all others; longer rows (prefill chunks) run one by one.
- Grouped queries need no repeated keys: in a decode row the query heads of a key-value head become its query rows; in
  a chunk the keys are expanded with stride 0.
- An index beyond a row's length points at the row's own first key. What attention never reads can't poison it: a mask
  alone would not do, since 0 x NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runner_svc.kv_cache import KVCache

# A row joins a group of longer rows where the keys wasted on padding it stay below this many: gathering them costs
# about what one more group does.
MAX_PADDING = 128


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGroup:
    """Rows of one position each, padded to the longest."""

    # int64 [R]: index of each row's query among the step's T positions; None when they are all of them in order.
    queries: Tensor | None
    # int64 [R * S]: where in the cache each row's keys are.
    keys: Tensor
    # float [R, 1, 1, S]: 0 or -inf; None when no row is padded.
    mask: Tensor | None
    num_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A row of many positions."""

    # Its queries among the step's T positions.
    queries: slice
    # int64 [S]: where in the cache its keys are.
    keys: Tensor
    # float [C, S]: 0 or -inf; None when the plain causal mask serves (no keys before the chunk, no window cuts).
    mask: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class WindowPlan:
    """What the queries of a step read in layers of one window."""

    groups: list[DecodeGroup]
    chunks: list[Chunk]


AttentionPlan = dict[int | None, WindowPlan]
"""Per window (tokens, or None for all)."""


class CpuAttention:
    """Attention of all layers over one cache."""

    def __init__(self, cache: KVCache, num_heads: int, num_kv_heads: int, windows: Sequence[int | None]) -> None:
        self._cache = cache
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._windows = tuple(windows)

    def plan(
        self, starts: NDArray[np.int32], counts: NDArray[np.int32], block_tables: NDArray[np.int32]
    ) -> AttentionPlan:
        """Works out a step: rows of `counts` [R] positions from `starts` [R], with `block_tables` [R, W]."""
        return {window: self._plan_window(starts, counts, block_tables, window) for window in set(self._windows)}

    def run(self, plan: AttentionPlan, layer: int, queries: Tensor) -> Tensor:
        """Attends with queries [T, num_heads, head_dim] over what the cache holds of `layer`, this step included.

        Returns [T, num_heads * head_dim].
        """
        window_plan = plan[self._windows[layer]]
        groups, chunks = window_plan.groups, window_plan.chunks
        if len(groups) == 1 and groups[0].queries is None:
            return self._run_group(layer, groups[0], queries)
        output = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
        for group in groups:
            output[group.queries] = self._run_group(layer, group, queries[group.queries])
        for chunk in chunks:
            output[chunk.queries] = self._run_chunk(layer, chunk, queries[chunk.queries])
        return output

    def _run_group(self, layer: int, group: DecodeGroup, queries: Tensor) -> Tensor:
        """[R, num_heads, head_dim] queries, one per row, to [R, num_heads * head_dim]."""
        rows, kv_heads, head_dim = group.num_rows, self._num_kv_heads, queries.shape[-1]
        keys, values = self._gather(layer, group.keys)
        attended = scaled_dot_product_attention(
            queries.reshape(rows, kv_heads, -1, head_dim),
            keys.view(rows, -1, kv_heads, head_dim).transpose(1, 2),
            values.view(rows, -1, kv_heads, head_dim).transpose(1, 2),
            attn_mask=group.mask,
        )
        return attended.reshape(rows, -1)

    def _run_chunk(self, layer: int, chunk: Chunk, queries: Tensor) -> Tensor:
        """[C, num_heads, head_dim] queries of one sequence to [C, num_heads * head_dim]."""
        kv_heads, head_dim = self._num_kv_heads, queries.shape[-1]
        group_size = self._num_heads // kv_heads
        keys, values = (
            gathered.view(-1, kv_heads, 1, head_dim).permute(1, 2, 0, 3).expand(-1, group_size, -1, -1)
            for gathered in self._gather(layer, chunk.keys)
        )
        attended = scaled_dot_product_attention(
            queries.unflatten(1, (kv_heads, group_size)).permute(1, 2, 0, 3),
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
        )
        return attended.permute(2, 0, 1, 3).reshape(queries.shape[0], -1)

    def _gather(self, layer: int, indices: Tensor) -> tuple[Tensor, Tensor]:
        cache = self._cache
        return cache.keys[layer].index_select(0, indices), cache.values[layer].index_select(0, indices)

    def _plan_window(
        self,
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        window: int | None,
    ) -> WindowPlan:
        ends = starts + counts
        # Position of the first key that the row's first query sees.
        firsts = np.zeros_like(starts) if window is None else np.maximum(starts - (window - 1), 0)
        offsets = np.cumsum(counts) - counts
        decode_rows = np.flatnonzero(counts == 1)
        groups = [
            self._plan_group(rows, offsets, firsts, ends, block_tables)
            for rows in group_by_length(decode_rows, (ends - firsts)[decode_rows])
        ]
        chunks = [
            self._plan_chunk(offsets[row], firsts[row], starts[row], ends[row], block_tables[row], window)
            for row in np.flatnonzero(counts > 1)
        ]
        return WindowPlan(groups, chunks)

    def _plan_group(
        self,
        rows: NDArray[np.intp],
        offsets: NDArray[np.int32],
        firsts: NDArray[np.int32],
        ends: NDArray[np.int32],
        block_tables: NDArray[np.int32],
    ) -> DecodeGroup:
        lengths = ends[rows] - firsts[rows]
        steps = np.arange(lengths.max())
        valid = steps < lengths[:, None]
        positions = firsts[rows][:, None] + np.where(valid, steps, 0)
        keys = self._cache_index(
            np.take_along_axis(block_tables[rows], positions // self._cache.block_size, 1), positions
        )
        mask = None
        if not valid.all():
            mask = self._mask(valid).view(len(rows), 1, 1, -1)
        queries = None if len(rows) == len(offsets) and _is_in_order(rows) else torch.from_numpy(offsets[rows])
        return DecodeGroup(queries, torch.from_numpy(keys.ravel()), mask, len(rows))

    def _plan_chunk(
        self,
        offset: np.int32,
        first: np.int32,
        start: np.int32,
        end: np.int32,
        block_table: NDArray[np.int32],
        window: int | None,
    ) -> Chunk:
        positions = np.arange(first, end)
        keys = self._cache_index(block_table[positions // self._cache.block_size], positions)
        mask = None
        if start > 0 or (window is not None and end > window):
            queries = np.arange(start, end)[:, None]
            visible = positions <= queries
            if window is not None:
                visible &= positions > queries - window
            mask = self._mask(visible)
        return Chunk(slice(int(offset), int(offset + end - start)), torch.from_numpy(keys), mask)

    def _cache_index(self, blocks: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        block_size = self._cache.block_size
        return blocks.astype(np.int64) * block_size + positions % block_size

    def _mask(self, visible: NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.where(visible, np.float32(0), np.float32("-inf"))).to(self._cache.data.dtype)


def group_by_length(rows: NDArray[np.intp], lengths: NDArray[np.int32]) -> list[NDArray[np.intp]]:
    """Splits `rows` [R] with `lengths` [R] into groups that waste little on padding, each in the order of `rows`."""
    groups: list[list[int]] = []
    padding = longest = 0
    for index in np.argsort(-lengths, kind="stable"):
        length = int(lengths[index])
        if groups and padding + longest - length <= MAX_PADDING + longest * len(groups[-1]) // 4:
            padding += longest - length
            groups[-1].append(int(index))
        else:
            groups.append([int(index)])
            padding, longest = 0, length
    return [rows[np.sort(np.array(group))] for group in groups]


def _is_in_order(rows: NDArray[np.intp]) -> bool:
    return bool((rows == np.arange(len(rows))).all())
