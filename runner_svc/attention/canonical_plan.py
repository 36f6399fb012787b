"""What each query of a step reads, in segments of 256 positions: the plan of `canonical`.

A segment begins at a multiple of 256 of the sequence's positions, whatever the window, the chunk or the prefix hit. A
*tile* is a row's consecutive queries, at most `MOST_QUERIES`; a *pair* is a tile and a segment of which it sees a
position. Tiles of like size are computed together as a *group*. A tile's last segment is its *tail*: of the tails of a
group, only as many positions are read as one of them has, rounded up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.interface.kv_cache import int64

SEGMENT = 256
MOST_QUERIES = 256
"""Queries of a tile: more would compute more scores that the causal mask then hides."""
_FEW = (1, 2, 4, 8, 16)
"""Sizes of tiles that are computed together; larger ones are alone."""


@dataclass(frozen=True, slots=True)
class Tile:
    """`count` queries of the step's `row` at positions from `start`, whose first has the index `first` in the step."""

    row: int
    start: int
    count: int
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Pairs that are read in one go, each up to the same position of its segment."""

    pairs: slice
    keys: int  # positions of each segment that are read
    # int64 [pairs * blocks of a segment that are read] each.
    blocks_of_keys: Tensor
    blocks_of_values: Tensor
    # int64: indexes, among the positions read, of those that no query of the tile sees; None without any.
    unseen: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """I tiles of up to C queries each, and their P pairs: tails last, then by segment of the tile, then by tile."""

    tiles: list[Tile]
    # int64 [I * C]: index of each query in the step; a tile with fewer repeats its last one.
    queries: Tensor
    # int64 [N]: those of the I * C that are not repeated; None if all are.
    used: Tensor | None
    width: int  # C
    # Whole segments, then tails.
    parts: list[Part]
    # int64 [P]: tile of each pair.
    tile_of_pair: Tensor
    # Pairs from the first to the last of which a query does not see each position.
    masked: slice
    # float32 [those pairs, 1, C, 256]: 0 where the query sees the position, otherwise -inf; and 1 or 0.
    mask: Tensor
    visible: Tensor
    # Pairs with the n-th segment of their tile, and those tiles, ascending, int64 each, for n from 0.
    rounds: list[tuple[Tensor, Tensor]]

    @property
    def segments(self) -> int | None:
        """Segments of each tile, if all have as many."""
        return len(self.rounds) if len(self.rounds) * len(self.tiles) == len(self.tile_of_pair) else None


class CanonicalPlanner:
    """Plans the steps of one cache."""

    def __init__(self, block_size: int, num_blocks: int, most_pairs: int, most_read: int, keys: int = SEGMENT) -> None:
        """`most_pairs`: a group has no more, unless one tile does. `keys`: a power of 2; tails are rounded up to it.

        `most_read`: positions that a part reads, at least 256.
        """
        self._most_read = most_read
        self._block_size = block_size
        self._unit = max(block_size, keys)
        self._value_offset = num_blocks + 1
        self._most_pairs = most_pairs

    def plan(
        self,
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        tables: NDArray[np.int32],
        window: int | None,
    ) -> list[Group]:
        """Returns the groups of a step: rows of `counts` [R] positions from `starts` [R], with block tables [R, W]."""
        firsts = np.cumsum(counts) - counts
        by_width: dict[int, list[Tile]] = {}
        for row, (start, count, first) in enumerate(
            zip(starts.tolist(), counts.tolist(), firsts.tolist(), strict=True)
        ):
            for offset in range(0, count, MOST_QUERIES):
                size = min(MOST_QUERIES, count - offset)
                width = next((few for few in _FEW if size <= few), size)
                by_width.setdefault(width, []).append(Tile(row, start + offset, size, first + offset))
        return [
            self.group(tiles, width, tables, window)
            for width, alike in by_width.items()
            for tiles in self._bounded(alike, width, window)
        ]

    def _bounded(self, tiles: list[Tile], width: int, window: int | None) -> Iterable[list[Tile]]:
        most = max(1, self._most_pairs // max(1, width // _FEW[-1]))
        taken: list[Tile] = []
        pairs = 0
        for tile in tiles:
            own = len(_segments(tile, window))
            if taken and pairs + own > most:
                yield taken
                taken, pairs = [], 0
            taken.append(tile)
            pairs += own
        if taken:
            yield taken

    def group(self, tiles: list[Tile], width: int, tables: NDArray[np.int32], window: int | None) -> Group:
        """Returns the group of `tiles`, each padded to `width` queries."""
        segments = [_segments(tile, window) for tile in tiles]
        numbers = np.array([len(own) for own in segments])
        tile_of_pair = np.repeat(np.arange(len(tiles)), numbers)
        segment_of_pair = np.concatenate([np.arange(own.start, own.stop) for own in segments])
        ordinals = np.arange(len(tile_of_pair)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        order = np.lexsort((tile_of_pair, ordinals, ordinals == numbers[tile_of_pair] - 1))
        tile_of_pair, segment_of_pair, ordinals = tile_of_pair[order], segment_of_pair[order], ordinals[order]
        counts = np.array([tile.count for tile in tiles])
        columns = np.minimum(np.arange(width), counts[:, None] - 1)
        queries = np.array([tile.first for tile in tiles])[:, None] + columns
        positions = (np.array([tile.start for tile in tiles])[:, None] + columns)[tile_of_pair, :, None]
        keys = (segment_of_pair[:, None] * SEGMENT + np.arange(SEGMENT))[:, None, :]
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        pairs = np.flatnonzero(hidden.any(axis=(1, 2)))
        masked = slice(int(pairs[0]), int(pairs[-1]) + 1) if len(pairs) else slice(0, 0)
        visible = torch.from_numpy(~hidden[masked]).unsqueeze(1).float()
        tail = max((tile.start + tile.count - 1) % SEGMENT for tile in tiles) // self._unit * self._unit + self._unit
        whole = len(tile_of_pair) - len(tiles) if tail < SEGMENT else 0
        rows, unseen = np.array([tile.row for tile in tiles])[tile_of_pair], hidden.all(axis=1)
        parts = [
            self._part(
                slice(begin, min(begin + self._most_read // read, end)), read, rows, segment_of_pair, unseen, tables
            )
            for first, end, read in ((0, whole, SEGMENT), (whole, len(tile_of_pair), tail))
            for begin in range(first, end, self._most_read // read)
        ]
        used = np.arange(width) < counts[:, None]
        return Group(
            tiles=tiles,
            queries=torch.from_numpy(queries.ravel()),
            used=None if used.all() else torch.from_numpy(np.flatnonzero(used)),
            width=width,
            parts=parts,
            tile_of_pair=torch.from_numpy(tile_of_pair),
            masked=masked,
            mask=torch.where(visible > 0, 0.0, -torch.inf),
            visible=visible,
            rounds=[_round(ordinals == number, tile_of_pair) for number in range(int(numbers.max()))],
        )

    def _part(
        self,
        pairs: slice,
        read: int,
        rows: NDArray[np.integer],
        segments: NDArray[np.integer],
        unseen: NDArray[np.bool_],
        tables: NDArray[np.int32],
    ) -> Part:
        own = segments[pairs, None] * (SEGMENT // self._block_size) + np.arange(read // self._block_size)
        # Positions of repeated last columns lie beyond the sequence's end.
        columns = np.minimum(own, tables.shape[1] - 1)
        keys = int64(tables[rows[pairs, None], columns].ravel())
        indexes = np.flatnonzero(unseen[pairs, :read])
        zeroed = torch.from_numpy(indexes) if len(indexes) else None
        return Part(pairs, read, keys, keys + self._value_offset, zeroed)


def _segments(tile: Tile, window: int | None) -> range:
    first = 0 if window is None else max(0, tile.start - (window - 1))
    return range(first // SEGMENT, (tile.start + tile.count - 1) // SEGMENT + 1)


def _round(chosen: NDArray[np.bool_], tile_of_pair: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
    pairs = np.flatnonzero(chosen)
    pairs = pairs[np.argsort(tile_of_pair[pairs])]
    return torch.from_numpy(pairs), torch.from_numpy(tile_of_pair[pairs])
