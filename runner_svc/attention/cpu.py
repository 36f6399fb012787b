"""Paged attention on a CPU, in torch: gathered blocks through `scaled_dot_product_attention`.

Work is split as in flashinfer: `plan`, once per step, determines which blocks each query reads (the same for all layers
of one window); `run`, once per layer, only gathers and multiplies. Design choices:

- Rows of one position (decode) are vectorised over the batch, in groups of similar length so that one long sequence
  doesn't pad all the others. Longer rows (prefill chunks) run one by one.
- Whole blocks are gathered, keys and values in one call, which is twice as fast as position by position. Positions
  beyond the sequence's end are then zeroed: a mask alone is not enough, because 0 x NaN is NaN.
- Grouped queries need no repeated keys: in a decode row the query heads of a key-value head become its query rows; in
  a chunk the keys are expanded with stride 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.kv_cache import KVCache, int64

# A row joins a group of longer rows while the group's padding stays within this many positions or a quarter of the
# group's positions: reading that much padding costs about as much as another group.
MAX_PADDING = 128


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGroup:
    """R rows of one position each. Each reads W blocks and uses their first `length` = S positions."""

    # int64 [R]: index of each row's query among the step's T positions; None if the group is the whole step, in order.
    queries: Tensor | None
    # int64 [2 * R * W]: blocks of the keys, then of the values.
    blocks: Tensor
    # int64: indices, among the 2 * R * W * block_size gathered positions, of those beyond their row's end; None without
    # any.
    beyond: Tensor | None
    # float [R, 1, 1, S]: 0 or -inf; None if all rows see all S positions.
    mask: Tensor | None
    num_rows: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A row of C positions that sees S positions."""

    # Its queries' indices among the step's T positions.
    queries: slice
    # int64 [2 * W]: blocks of the keys, then of the values.
    blocks: Tensor
    # The positions of the gathered blocks that it sees.
    seen: slice
    # float [C, S]: 0 or -inf; None if the plain causal mask is right (no keys before the chunk, none cut by a window).
    mask: Tensor | None
    # Its positions behind the first have drafts: whatever they compute, those before must not depend on it.
    drafts: bool


@dataclass(frozen=True, slots=True, eq=False)
class WindowPlan:
    """Positions that the queries of a step read, in all layers with the same attention window."""

    groups: list[DecodeGroup]
    chunks: list[Chunk]


AttentionPlan = dict[int | None, WindowPlan]
"""Window plan by window (in tokens; None: no window)."""


class CpuAttention:
    """Attention of all layers over one cache."""

    def __init__(self, cache: KVCache, num_heads: int, num_kv_heads: int, layers: Sequence[AttentionLayer]) -> None:
        self._cache = cache
        self._num_kv_heads = num_kv_heads
        self._group_size = num_heads // num_kv_heads
        self._layers = tuple(layers)

    def plan(
        self,
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        drafts: NDArray[np.int32] | None = None,
    ) -> AttentionPlan:
        """Plans a step: rows of `counts` [R] positions from `starts` [R], with `block_tables` [R, W].

        `drafts` [R] or [0]: how many of a row's last positions have drafts.
        """
        windows = {layer.window for layer in self._layers}
        drafting = drafts > 0 if drafts is not None and len(drafts) else np.zeros(len(starts), np.bool_)
        return {window: self._plan_window(starts, counts, block_tables, drafting, window) for window in windows}

    def planned(
        self,
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        drafts: NDArray[np.int32] | None = None,
    ) -> Callable[[int, Tensor], Tensor]:
        """Returns `run` of a step; see `plan`."""
        return partial(self.run, self.plan(starts, counts, block_tables, drafts))

    def run(self, plan: AttentionPlan, layer: int, queries: Tensor) -> Tensor:
        """Attends with queries [T, num_heads, head_dim] over the cached positions of `layer`, this step's included.

        Returns [T, num_heads * head_dim].
        """
        window_plan = plan[self._layers[layer].window]
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
        """Attends with queries [R, num_heads, head_dim], one per row. Returns [R, num_heads * head_dim]."""
        rows, kv_heads, head_dim = group.num_rows, self._num_kv_heads, queries.shape[-1]
        gathered = self._cache.blocks[layer].index_select(0, group.blocks)
        if group.beyond is not None:
            gathered.view(-1, kv_heads * head_dim).index_fill_(0, group.beyond, 0.0)
        # [2, R, kv_heads, S, head_dim]
        seen = gathered.view(2, rows, -1, kv_heads, head_dim)[:, :, : group.length].transpose(2, 3)
        grouped = queries.reshape(rows, kv_heads, -1, head_dim)
        described = self._layers[layer]
        sinks = None if described.sinks is None else described.sinks.view(kv_heads, -1, 1)
        attended = attend(grouped, seen[0], seen[1], group.mask, described, sinks)
        return attended.reshape(rows, -1)

    def _run_chunk(self, layer: int, chunk: Chunk, queries: Tensor) -> Tensor:
        """Attends with queries [C, num_heads, head_dim] of one sequence. Returns [C, num_heads * head_dim]."""
        kv_heads, head_dim = self._num_kv_heads, queries.shape[-1]
        gathered = self._cache.blocks[layer].index_select(0, chunk.blocks)
        seen = gathered.view(2, -1, kv_heads, 1, head_dim)[:, chunk.seen]
        # [2, kv_heads, group_size, S, head_dim], where the stride of group_size is 0
        seen = seen.permute(0, 2, 3, 1, 4).expand(-1, -1, self._group_size, -1, -1)
        grouped = queries.unflatten(1, (kv_heads, self._group_size)).permute(1, 2, 0, 3)
        described = self._layers[layer]
        sinks = None if described.sinks is None else described.sinks.view(kv_heads, -1, 1, 1)
        attended = attend(grouped, seen[0], seen[1], chunk.mask, described, sinks, is_causal=chunk.mask is None)
        if chunk.drafts and not attended.sum().isfinite():
            attended = self._attend_one_by_one(grouped, seen, chunk.mask, described, sinks)
        return attended.permute(2, 0, 1, 3).reshape(queries.shape[0], -1)

    def _attend_one_by_one(
        self, queries: Tensor, seen: Tensor, mask: Tensor | None, layer: AttentionLayer, sinks: Tensor | None
    ) -> Tensor:
        """Attends like `attend`, but no key behind a query's position is read: a mask does not hide NaN."""
        count, keys = queries.shape[-2], seen.shape[-2]
        outputs = []
        for index in range(count):
            length = keys - count + index + 1
            own = seen[..., :length, :]
            row = None if mask is None else mask[index : index + 1, :length]
            outputs.append(attend(queries[..., index : index + 1, :], own[0], own[1], row, layer, sinks))
        return torch.cat(outputs, dim=-2)

    def _plan_window(
        self,
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        drafting: NDArray[np.bool_],
        window: int | None,
    ) -> WindowPlan:
        ends = starts + counts
        # Position of the first key that the row's first query sees.
        firsts = np.zeros_like(starts) if window is None else np.maximum(starts - (window - 1), 0)
        offsets = np.cumsum(counts) - counts
        decode_rows = np.flatnonzero(counts == 1)
        groups = [
            self._plan_group(rows, offsets, firsts[rows], ends[rows], block_tables[rows])
            for rows in group_by_length(decode_rows, (ends - firsts)[decode_rows])
        ]
        chunks = [
            self._plan_chunk(
                int(offsets[row]),
                int(firsts[row]),
                int(starts[row]),
                int(ends[row]),
                table,
                window,
                bool(drafting[row]),
            )
            for row, table in enumerate(block_tables)
            if counts[row] > 1
        ]
        return WindowPlan(groups, chunks)

    def _plan_group(
        self,
        rows: NDArray[np.intp],
        offsets: NDArray[np.int64],
        firsts: NDArray[np.int32],
        ends: NDArray[np.int32],
        block_tables: NDArray[np.int32],
    ) -> DecodeGroup:
        """Plans the group of `rows`, indices into the step's rows and `offsets`; the other arrays are by group row."""
        block_size = self._cache.block_size
        first_blocks = firsts // block_size
        width = int((-(-ends // block_size) - first_blocks).max())
        # A row with fewer blocks repeats its table's last column: those positions lie beyond its end.
        columns = np.minimum(first_blocks[:, None] + np.arange(width), block_tables.shape[1] - 1)
        blocks = self._keys_and_values(np.take_along_axis(block_tables, columns, 1).ravel())
        bases = first_blocks[:, None] * block_size
        positions = bases + np.arange(width * block_size)
        length = int((ends[:, None] - bases).max())
        beyond = (positions >= ends[:, None])[:, :length]
        hidden = beyond | (positions < firsts[:, None])[:, :length]
        in_order = len(rows) == len(offsets) and bool((rows == np.arange(len(rows))).all())
        return DecodeGroup(
            queries=None if in_order else torch.from_numpy(offsets[rows]),
            blocks=blocks,
            beyond=_gathered_indices(beyond, width * block_size) if beyond.any() else None,
            mask=self._mask(~hidden).view(len(rows), 1, 1, -1) if hidden.any() else None,
            num_rows=len(rows),
            length=length,
        )

    def _plan_chunk(
        self,
        offset: int,
        first: int,
        start: int,
        end: int,
        block_table: NDArray[np.int32],
        window: int | None,
        drafts: bool,
    ) -> Chunk:
        block_size = self._cache.block_size
        first_block = first // block_size
        base = first_block * block_size
        mask = None
        if start > 0 or (window is not None and end > window):
            positions, queries = np.arange(first, end), np.arange(start, end)[:, None]
            visible = positions <= queries
            if window is not None:
                visible &= positions > queries - window
            mask = self._mask(visible)
        return Chunk(
            queries=slice(offset, offset + end - start),
            blocks=self._keys_and_values(block_table[first_block : -(-end // block_size)]),
            seen=slice(first - base, end - base),
            mask=mask,
            drafts=drafts,
        )

    def _keys_and_values(self, blocks: NDArray[np.int32]) -> Tensor:
        """Returns int64 [2 * N]: indices in `KVCache.blocks` of the keys of `blocks` [N], then of their values."""
        keys = int64(blocks)
        return torch.cat((keys, keys + self._cache.num_blocks + 1))

    def _mask(self, visible: NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.where(visible, np.float32(0), np.float32("-inf"))).to(self._cache.data.dtype)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    layer: AttentionLayer,
    sinks: Tensor | None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Returns attention of queries [..., C, head_dim] over keys and values [..., S, head_dim], shaped as the queries.

    `mask`, 0 or -inf, is added to the scores [..., C, S]; `is_causal` masks a square instead. `sinks` are the layer's,
    in a shape that broadcasts to [..., C, 1].
    """
    if layer.soft_cap is None and sinks is None:
        return scaled_dot_product_attention(queries, keys, values, mask, is_causal=is_causal, scale=layer.scale)
    scale = queries.shape[-1] ** -0.5 if layer.scale is None else layer.scale
    scores = queries @ keys.transpose(-1, -2) * scale
    if layer.soft_cap is not None:
        scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
    if is_causal:
        mask = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype).triu_(1)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return scores.softmax(-1)[..., : values.shape[-2]] @ values


def _gathered_indices(beyond: NDArray[np.bool_], gathered_length: int) -> Tensor:
    """Returns int64 indices of the set entries of `beyond` [R, S] in R rows of `gathered_length`, keys then values."""
    rows, positions = np.nonzero(beyond)
    indices = torch.from_numpy(rows * gathered_length + positions)
    return torch.cat((indices, indices + len(beyond) * gathered_length))


def group_by_length(rows: NDArray[np.intp], lengths: NDArray[np.int32]) -> list[NDArray[np.intp]]:
    """Splits `rows` [R] with `lengths` [R] into groups with little padding, each in the order of `rows`."""
    groups: list[list[int]] = []
    padding = longest = 0
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        if groups and padding + longest - length <= max(MAX_PADDING, longest * len(groups[-1]) // 4):
            padding += longest - length
            groups[-1].append(index)
        else:
            groups.append([index])
            padding, longest = 0, length
    return [rows[np.sort(np.array(group))] for group in groups]
