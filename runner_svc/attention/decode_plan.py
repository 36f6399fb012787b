"""The plan of a step's decode attention: how the work is split over thread blocks (kernels/paged_decode.cu).

The unit of work is a tile: 16 positions of one row for one unit (a key-value head with some of its query heads). The
tiles of a step form one line, cut into ranges of equal cost over a fixed grid, which balances the load. A plan is
packed int32 and contains everything that changes between steps: the launch itself depends only on the bucket. It is
made with vectorised operations, without CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

TILE = 16
ROW_WORDS = 8
RANGE_WORDS = 16
# Columns of a row: the fields of `Row` in kernels/decode_line.cuh.
ROW_START, ROW_TILES, ROW_LENGTH, ROW_FIRST, ROW_TABLE, ROW_QUERY, ROW_INDEX = range(7)
# Columns of a range after those of the row in which it begins: the fields of `Range` there. Head and tail are the
# (row, unit)s that it begins and ends in.
RANGE_BEGIN, RANGE_END = ROW_WORDS, ROW_WORDS + 1
HEAD_FIRST_SLOT, HEAD_LAST_BLOCK, TAIL_FIRST_SLOT, TAIL_LAST_BLOCK = range(ROW_WORDS + 2, ROW_WORDS + 6)
# Columns of `DecodePlanner._line`.
_TILE_START, _COST_START, _TILES, _COST = range(4)


@dataclass(frozen=True)
class DecodePlanner:
    """Makes the decode plans for one bucket's batch size, for all layers with the same attention window."""

    batch: int
    # Thread blocks that run at once, and the least cost of a range: one tile per warp.
    grid: int
    min_cost: int
    # Key-value heads times units per head.
    units: int
    # Cost of the end of a (row, unit), in tiles; less than `min_cost`.
    end_cost: int
    window: int | None
    # How many times the mean cost a range may have if all ranges are whole (row, unit)s; 0: ranges of equal cost only.
    # Whole ones need no merging between blocks.
    whole_limit: float = 0.0

    @property
    def words(self) -> int:
        """Size of a plan, in int32 words."""
        return ROW_WORDS * self.batch + RANGE_WORDS * self.grid

    @cached_property
    def _indexes(self) -> NDArray[np.int32]:
        return np.arange(self.batch, dtype=np.int32)

    @cached_property
    def _end_costs(self) -> NDArray[np.int32]:
        """End costs of all units before each row."""
        return self._indexes * (self.units * self.end_cost)

    @cached_property
    def _bound_indexes(self) -> NDArray[np.int32]:
        return np.arange(self.grid + 1, dtype=np.int32)

    def cost(self, lengths: NDArray[np.int32], firsts: NDArray[np.int32] | None = None) -> int:
        """Returns the cost of all rows, in tiles; `firsts` as in `write`."""
        if firsts is not None:
            seen = lengths - firsts // TILE * TILE
        else:
            seen = lengths if self.window is None else np.minimum(lengths, self.window)
        return self.units * int((-(-seen // TILE) + self.end_cost).sum())

    def write(
        self,
        lengths: NDArray[np.int32],
        table_rows: NDArray[np.int32],
        query_rows: NDArray[np.int32],
        plan: NDArray[np.int32],
        blocks: int | None = None,
        firsts: NDArray[np.int32] | None = None,
    ) -> None:
        """Fills `plan` [words] for N <= batch rows of `lengths` positions each, this step's included; arrays are [N].

        `firsts` are the first positions that rows see, by default those of the window. Padding rows get no work, and
        their output is left unchanged. Only the first `blocks` of the grid get work.
        """
        seen = self._firsts(lengths, firsts)
        tiles = (lengths - seen // TILE * TILE + (TILE - 1)) // TILE
        np.maximum(tiles, 1, out=tiles)
        rows, starts = self._write_rows(lengths, seen, tiles, table_rows, query_rows, plan)
        ranges = self._ranges(plan)
        blocks = blocks or self.grid
        if self.whole_limit and (bounds := self._whole_bounds(starts, tiles, blocks)) is not None:
            self._write_whole(bounds, rows, ranges)
            return
        aligned = self._aligned_cost(tiles, blocks) if self.end_cost == 0 else None
        self._write_ranges(self._line(starts, tiles, aligned), rows, ranges, blocks, aligned)

    def _firsts(self, lengths: NDArray[np.int32], firsts: NDArray[np.int32] | None) -> NDArray[np.int32] | np.int32:
        """Returns the first positions that rows see, as in `write`."""
        if self.window is None:
            return np.int32(0)
        return np.maximum(lengths - self.window, 0) if firsts is None else firsts

    def _write_rows(
        self,
        lengths: NDArray[np.int32],
        firsts: NDArray[np.int32] | np.int32,
        tiles: NDArray[np.int32],
        table_rows: NDArray[np.int32],
        query_rows: NDArray[np.int32],
        plan: NDArray[np.int32],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Fills the plan's rows; returns them [N, ROW_WORDS], and where each starts on the line of one unit's tiles."""
        num_rows = len(lengths)
        rows = plan[: ROW_WORDS * num_rows].reshape(num_rows, ROW_WORDS)
        starts = np.cumsum(tiles, dtype=np.int32)
        starts -= tiles
        rows[:, ROW_START] = starts
        rows[:, ROW_TILES] = tiles
        rows[:, ROW_LENGTH] = lengths
        rows[:, ROW_FIRST] = firsts
        rows[:, ROW_TABLE] = table_rows
        rows[:, ROW_QUERY] = query_rows
        rows[:, ROW_INDEX] = self._indexes[:num_rows]
        return rows, starts

    def _ranges(self, plan: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the plan's ranges, [grid, RANGE_WORDS]."""
        return plan[ROW_WORDS * self.batch : self.words].reshape(self.grid, RANGE_WORDS)

    def _whole_bounds(
        self, starts: NDArray[np.int32], tiles: NDArray[np.int32], blocks: int
    ) -> NDArray[np.int32] | None:
        """Returns bounds of ranges with as many whole (row, unit)s each, [grid + 1], on the line of tiles.

        Returns None if the longest of them would exceed the limit.
        """
        units = self.units * len(tiles)
        bounds = np.minimum(self._bound_indexes * -(-units // blocks), units)
        rows, inside = np.divmod(bounds, self.units)
        rows = np.minimum(rows, len(tiles) - 1)
        inside[bounds == units] = self.units
        ends = inside * tiles[rows] + starts[rows] * self.units
        costs = ends + bounds * self.end_cost
        if (costs[1:] - costs[:-1]).max() * blocks > self.whole_limit * costs[-1]:
            return None
        return ends

    def _write_whole(self, bounds: NDArray[np.int32], rows: NDArray[np.int32], ranges: NDArray[np.int32]) -> None:
        """Fills `ranges` [grid, RANGE_WORDS]; of each range, both ends are its block's alone."""
        begins, own = np.minimum(bounds[:-1], bounds[-1] - 1), self._bound_indexes[:-1]
        row_of_begin = (rows[:, ROW_START] * self.units).searchsorted(begins, side="right") - 1
        ranges[:, :ROW_WORDS] = rows.take(row_of_begin, axis=0)
        ranges[:, RANGE_BEGIN] = bounds[:-1]
        ranges[:, RANGE_END] = bounds[1:]
        ranges[:, HEAD_FIRST_SLOT] = ranges[:, TAIL_FIRST_SLOT] = 2 * own
        ranges[:, HEAD_LAST_BLOCK] = ranges[:, TAIL_LAST_BLOCK] = own

    def _aligned_cost(self, tiles: NDArray[np.int32], blocks: int) -> int | None:
        """Returns the cost of ranges of which each is in one (row, unit), or None if they would be much longer.

        A range that ends one (row, unit) and begins another merges twice: for one row of 704 positions on an H200 that
        takes 2.7 µs, more than a round of tiles.
        """
        least = max(self.min_cost, -(-self.units * int(tiles.sum()) // blocks))
        costs = np.arange(least, least + self.min_cost + 1, dtype=np.int32)
        needed = self.units * (-(-tiles // costs[:, np.newaxis])).sum(axis=1)
        fitting = needed <= blocks
        return int(costs[fitting.argmax()]) if fitting.any() else None

    def _line(self, starts: NDArray[np.int32], tiles: NDArray[np.int32], aligned: int | None) -> NDArray[np.int32]:
        """Returns [N, 4]: each row's start on the lines of tiles and of costs, then tiles and cost of one unit.

        With `aligned`, units cost whole ranges of that cost.
        """
        line = np.empty((len(tiles), 4), np.int32)
        np.multiply(starts, self.units, out=line[:, _TILE_START])
        line[:, _TILES] = tiles
        if aligned is None:
            np.add(line[:, _TILE_START], self._end_costs[: len(tiles)], out=line[:, _COST_START])
            np.add(tiles, self.end_cost, out=line[:, _COST])
        else:
            whole = -(-tiles // aligned) * aligned
            line[:, _COST] = whole
            line[:, _COST_START] = self.units * (whole.cumsum() - whole)
        return line

    def _write_ranges(
        self,
        line: NDArray[np.int32],
        rows: NDArray[np.int32],
        ranges: NDArray[np.int32],
        blocks: int,
        aligned: int | None,
    ) -> None:
        tile_start, cost_start, tiles_of_unit, cost_of_unit = line[-1].tolist()
        num_tiles = tile_start + self.units * tiles_of_unit
        all_costs = cost_start + self.units * cost_of_unit
        cost = aligned or max(self.min_cost, -(-all_costs // blocks))
        # All work ends with the last of `blocks`; bounds of further blocks could overflow.
        bounds = self._bounds(line, np.minimum(np.minimum(self._bound_indexes, blocks) * cost, all_costs))
        # The first tile of each range, then the last tile of each (any tile for an empty range), and their rows.
        edges = np.empty(2 * self.grid, np.int32)
        np.minimum(bounds[:-1], num_tiles - 1, out=edges[: self.grid])
        np.maximum(bounds[1:], 1, out=edges[self.grid :])
        edges[self.grid :] -= 1
        row_of_edge = line[:, _TILE_START].searchsorted(edges, side="right")
        row_of_edge -= 1
        tile_starts, cost_starts, tiles, costs = line.take(row_of_edge, axis=0).T
        # Where the edge's (row, unit) begins on the line of costs. All shares have the same size on that line, so
        # division gives the blocks of its first and last tile. Several blocks may begin at its start, which is also its
        # predecessor's end; the last of them has its first tile.
        begins = edges - tile_starts
        begins //= tiles
        begins *= costs
        begins += cost_starts
        first_blocks = begins // cost
        first_slots = 2 * first_blocks
        first_blocks *= cost
        first_slots += begins > first_blocks + self.end_cost
        last_blocks = begins + tiles
        last_blocks -= 1
        last_blocks //= cost
        ranges[:, :ROW_WORDS] = rows.take(row_of_edge[: self.grid], axis=0)
        ranges[:, RANGE_BEGIN] = bounds[:-1]
        ranges[:, RANGE_END] = bounds[1:]
        ranges[:, HEAD_FIRST_SLOT], ranges[:, TAIL_FIRST_SLOT] = first_slots.reshape(2, self.grid)
        ranges[:, HEAD_LAST_BLOCK], ranges[:, TAIL_LAST_BLOCK] = last_blocks.reshape(2, self.grid)

    def _bounds(self, line: NDArray[np.int32], costs: NDArray[np.int32]) -> NDArray[np.int32]:
        """Maps `costs` on the line of costs to the line of tiles; a cost within a unit's end maps to its last tile."""
        row_of_bound = line[:, _COST_START].searchsorted(costs, side="right")
        row_of_bound -= 1
        tile_starts, cost_starts, tiles, cost_of_unit = line.take(row_of_bound, axis=0).T
        inside = costs - cost_starts
        units = inside // cost_of_unit
        inside -= units * cost_of_unit
        np.minimum(inside, tiles, out=inside)
        inside += tile_starts
        inside += units * tiles
        return inside
