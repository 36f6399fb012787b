"""Paged attention on a CPU whose bits depend on a query and the keys that it sees alone: see docs/determinism.md.

For each query: the maximum of its scores over all positions; weights p = exp(score - maximum), 0 where it does not see
a position; per segment of 256 absolute positions the sum of p and the product of p with the values; both added over the
segments in ascending order; one division at the end. A segment of which it sees nothing adds 0, so it makes no
difference whether it is computed.

Both products of a segment are `bmm` with the 256 keys on one side and the query heads of a key-value head on the other,
padded with zeros to a multiple of `rows` of them. Keys beyond the sequence's end are left out, down to a multiple of
`keys`: their weights are 0. `canonical_check` finds `rows` and `keys` for which a row's bits depend neither on the
others, nor on its place, nor on the keys left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from runner_svc.attention.canonical_plan import SEGMENT, CanonicalPlanner, Group, Part, Tile
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.kv_cache import KVCache

LEAST_EXPONENT = -80.0
"""Scores further below the maximum count as this far below it: exp takes 100 times as long where it underflows."""
_GROUP_BYTES = 2**26
"""Keys and values of a group, unless one tile has more."""
_READ_BYTES = 2**20
"""Keys or values that are read in one go, unless a segment has more: a core's cache has room for them."""


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalPlan:
    """A step's groups by attention window, and its block tables."""

    windows: dict[int | None, list[Group]]
    tables: NDArray[np.int32]


class CanonicalAttention:
    """Attention of all layers over one cache, whose block size divides 256."""

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        num_kv_heads: int,
        layers: Sequence[AttentionLayer],
        rows: int = 16,
        keys: int = SEGMENT,
    ) -> None:
        """`rows`, `keys`: multiples to which the rows and the keys of products are padded."""
        if SEGMENT % cache.block_size:
            raise ValueError(f"the block size, {cache.block_size}, does not divide {SEGMENT}")
        self._cache = cache
        self._num_kv_heads = num_kv_heads
        self._group_size = num_heads // num_kv_heads
        self._layers = tuple(layers)
        self._rows = rows
        position_bytes = num_kv_heads * cache.data.shape[-1] * 4
        most_pairs = max(1, _GROUP_BYTES // (2 * SEGMENT * position_bytes))
        most_read = max(SEGMENT, _READ_BYTES // position_bytes)
        self._planner = CanonicalPlanner(cache.block_size, cache.num_blocks, most_pairs, most_read, keys)
        self._buffer = torch.empty(most_read, num_kv_heads * cache.data.shape[-1])  # of what is read in one go

    def plan(
        self,
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        drafts: NDArray[np.int32] | None = None,
    ) -> CanonicalPlan:
        """Plans a step: rows of `counts` [R] positions from `starts` [R], with `block_tables` [R, W].

        `drafts` may be anything: a position's output does not depend on those behind it.
        """
        windows = {layer.window for layer in self._layers}
        groups = {window: self._planner.plan(starts, counts, block_tables, window) for window in windows}
        return CanonicalPlan(groups, block_tables)

    def planned(
        self,
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        drafts: NDArray[np.int32] | None = None,
    ) -> Callable[[int, Tensor], Tensor]:
        """Returns `run` of a step; see `plan`."""
        return partial(self.run, self.plan(starts, counts, block_tables, drafts))

    def run(self, plan: CanonicalPlan, layer: int, queries: Tensor) -> Tensor:
        """Attends with queries [T, num_heads, head_dim] over the cached positions of `layer`, this step's included.

        Returns [T, num_heads * head_dim].
        """
        described = self._layers[layer]
        scale = queries.shape[-1] ** -0.5 if described.scale is None else described.scale
        scaled = queries * scale
        output = queries.new_empty(len(queries), queries.shape[1] * queries.shape[2])
        for group in plan.windows[described.window]:
            attended = self._attend(group, layer, scaled)
            if group.width > 1 and not bool(attended.sum().isfinite()):
                attended = self._one_by_one(group, layer, scaled, plan)
            if group.used is None:
                output[group.queries] = attended
            else:
                output[group.queries[group.used]] = attended[group.used]
        return output

    def _one_by_one(self, group: Group, layer: int, queries: Tensor, plan: CanonicalPlan) -> Tensor:
        """Attends like `_attend`, but reads no value behind a query's position: 0 x NaN is NaN.

        A draft's values may be NaN, and those of a prompt behind it.
        """
        window = self._layers[layer].window
        singles = [
            Tile(tile.row, tile.start + place, 1, tile.first + place)
            for tile in group.tiles
            for place in np.minimum(np.arange(group.width), tile.count - 1).tolist()
        ]
        return torch.cat(
            [self._attend(self._planner.group([single], 1, plan.tables, window), layer, queries) for single in singles]
        )

    def _attend(self, group: Group, layer: int, queries: Tensor) -> Tensor:
        """Attends with scaled queries [T, num_heads, head_dim]. Returns [I * C, num_heads * head_dim] of the group."""
        described, kv_heads, head_dim = self._layers[layer], self._num_kv_heads, queries.shape[-1]
        tiles, width, size = len(group.tiles), group.width, self._group_size
        rows = queries.index_select(0, group.queries).view(tiles, width, kv_heads, size, head_dim)
        rows = rows.permute(2, 0, 3, 1, 4).reshape(kv_heads, tiles, size * width, head_dim)
        if padding := -(size * width) % self._rows:
            rows = functional.pad(rows, (0, 0, 0, padding))
        if len(group.rounds) > 1:
            rows = rows.index_select(1, group.tile_of_pair)
        scores = queries.new_empty(kv_heads, len(group.tile_of_pair), rows.shape[2], SEGMENT)
        for part in group.parts:
            keys = self._read(part, layer, part.blocks_of_keys)
            for head in range(kv_heads):
                own = rows[head, part.pairs], keys[:, :, head].transpose(1, 2)
                if part.keys == SEGMENT:
                    torch.bmm(*own, out=scores[head, part.pairs])
                else:
                    scores[head, part.pairs, :, : part.keys] = torch.bmm(*own)
                    scores[head, part.pairs, :, part.keys :] = 0
        if described.soft_cap is not None:
            scores.div_(described.soft_cap).tanh_().mul_(described.soft_cap)
        sinks = None
        if described.sinks is not None:
            sinks = described.sinks.view(kv_heads, 1, size, 1).expand(-1, tiles, -1, width).flatten(2)
            sinks = functional.pad(sinks, (0, padding))
        summed = self._weighted(group, scores, layer, sinks)
        summed = summed[:, :, : size * width].unflatten(2, (size, width))
        return summed.permute(1, 3, 0, 2, 4).reshape(tiles * width, -1)

    def _read(self, part: Part, layer: int, blocks: Tensor) -> Tensor:
        """Returns a part's keys or values, [pairs, part.keys, kv_heads, head_dim], valid until the next call."""
        cached = self._cache.blocks[layer]
        read = self._buffer[: len(blocks) * self._cache.block_size]
        torch.index_select(cached, 0, blocks, out=read.view(len(blocks), -1))
        if part.unseen is not None:
            read.index_fill_(0, part.unseen, 0.0)  # they may never have been written
        return read.view(-1, part.keys, self._num_kv_heads, self._cache.data.shape[-1])

    def _weighted(self, group: Group, scores: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        """Returns the layer's values weighted by the softmax, [kv_heads, I, rows, head_dim].

        `scores` [kv_heads, P, rows, 256] are overwritten. `sinks` [kv_heads, I, rows].
        """
        masked = scores[:, group.masked, : self._group_size * group.width].unflatten(2, (self._group_size, group.width))
        masked.add_(group.mask)
        most = _over_segments(group, scores.amax(dim=-1), sinks, torch.maximum)
        of_pairs = most if len(group.rounds) == 1 else most.index_select(1, group.tile_of_pair)
        scores.sub_(of_pairs.unsqueeze(-1)).clamp_(min=LEAST_EXPONENT).exp_()
        masked.mul_(group.visible)
        products = scores.new_empty(*scores.shape[:3], self._cache.data.shape[-1])
        for part in group.parts:
            values = self._read(part, layer, part.blocks_of_values)
            for head in range(len(scores)):
                weights = scores[head, part.pairs, :, : part.keys]
                torch.bmm(weights, values[:, :, head], out=products[head, part.pairs])
        total = _over_segments(group, scores.sum(dim=-1), None, torch.add)
        output = _over_segments(group, products, None, torch.add)
        if sinks is not None:
            total = total + (sinks - most).clamp_(min=LEAST_EXPONENT).exp_()
        return output.div_(total.unsqueeze(-1))


def _over_segments(
    group: Group, values: Tensor, first: Tensor | None, combine: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Combines values [kv_heads, P, ...] of a tile's segments, in ascending order. Returns [kv_heads, I, ...].

    `first` [kv_heads, I, ...] comes before them.
    """
    if (segments := group.segments) is not None:
        parts = list(values.unflatten(1, (segments, -1)).unbind(1))
        total = parts[0] if first is None else combine(first, parts[0])
        for part in parts[1:]:
            total = combine(total, part)
        return total
    start = values[:, group.rounds[0][0]]
    total = start if first is None else combine(first, start)
    for pairs, tiles in group.rounds[1:]:
        total = total.index_copy(1, tiles, combine(total.index_select(1, tiles), values.index_select(1, pairs)))
    return total
