"""The reference for `attention.decode_plan`: the ranges that share a (row, unit) are searched, not computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner_svc.attention.decode_plan import (
    HEAD_FIRST_SLOT,
    HEAD_LAST_BLOCK,
    RANGE_BEGIN,
    RANGE_END,
    RANGE_WORDS,
    ROW_FIRST,
    ROW_INDEX,
    ROW_LENGTH,
    ROW_QUERY,
    ROW_START,
    ROW_TABLE,
    ROW_TILES,
    ROW_WORDS,
    TAIL_FIRST_SLOT,
    TAIL_LAST_BLOCK,
    TILE,
)


@dataclass(frozen=True, slots=True)
class PlannerTwin:
    """Like `DecodePlanner`, with the same fields."""

    batch: int
    # Blocks of threads that run at once, and the least cost of a range: one tile per warp.
    grid: int
    min_cost: int
    # Number of key-value heads times the units into which each is split.
    units: int
    # Cost of the end of a (row, unit) in tiles; less than `min_cost`.
    end_cost: int
    window: int | None

    @property
    def words(self) -> int:
        """Length of a plan in int32 words."""
        return ROW_WORDS * self.batch + RANGE_WORDS * self.grid

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

        Padding rows of the batch are no work, and their output is unchanged. Only the first `blocks` of the grid get
        work. `firsts` are the first positions that rows see, by default those of the window.
        """
        rows = plan[: ROW_WORDS * len(lengths)].reshape(len(lengths), ROW_WORDS)
        if firsts is None:
            firsts = np.zeros_like(lengths) if self.window is None else np.maximum(lengths - self.window, 0)
        tiles = np.maximum((lengths - firsts // TILE * TILE + TILE - 1) // TILE, 1)
        ends = np.cumsum(tiles)
        rows[:, ROW_START] = ends - tiles
        rows[:, ROW_TILES] = tiles
        rows[:, ROW_LENGTH] = lengths
        rows[:, ROW_FIRST] = firsts
        rows[:, ROW_TABLE] = table_rows
        rows[:, ROW_QUERY] = query_rows
        rows[:, ROW_INDEX] = np.arange(len(lengths))
        ranges = plan[ROW_WORDS * self.batch : self.words].reshape(self.grid, RANGE_WORDS)
        self._write_ranges(tiles, ends * self.units, rows, ranges, blocks or self.grid)

    def _write_ranges(
        self,
        tiles: NDArray[np.int32],
        ends: NDArray[np.int64],
        rows: NDArray[np.int32],
        ranges: NDArray[np.int32],
        blocks: int,
    ) -> None:
        """`ends` [N] is each row's end on the line of tiles."""
        bounds = self._bounds(tiles, ends, blocks)
        begins = bounds[:-1]
        # The first and last tile of each range (any tile if it is empty), and the (row, unit) that contains each.
        edges = np.concatenate((np.minimum(begins, ends[-1] - 1), np.maximum(bounds[1:] - 1, 0)))
        row_of_edge = np.searchsorted(ends, edges, side="right")
        tiles_of_row = tiles[row_of_edge]
        first_tiles = edges - (edges - (ends - tiles * self.units)[row_of_edge]) % tiles_of_row
        # The ranges that contain its first and last tile. If several ranges begin at one place, only the last is
        # nonempty.
        first_blocks = np.searchsorted(begins, first_tiles, side="right") - 1
        last_blocks = np.searchsorted(begins, first_tiles + tiles_of_row - 1, side="right") - 1
        first_slots = 2 * first_blocks + (begins[first_blocks] != first_tiles)
        ranges[:, :ROW_WORDS] = rows[row_of_edge[: self.grid]]
        ranges[:, RANGE_BEGIN] = begins
        ranges[:, RANGE_END] = bounds[1:]
        ranges[:, HEAD_FIRST_SLOT], ranges[:, TAIL_FIRST_SLOT] = first_slots.reshape(2, self.grid)
        ranges[:, HEAD_LAST_BLOCK], ranges[:, TAIL_LAST_BLOCK] = last_blocks.reshape(2, self.grid)

    def _bounds(self, tiles: NDArray[np.int32], ends: NDArray[np.int64], blocks: int) -> NDArray[np.int64]:
        """Returns where ranges of equal cost begin on the line of tiles, and where the last one ends [grid + 1]."""
        costs = tiles + self.end_cost
        cost = max(self.min_cost, -(-int(costs.sum()) * self.units // blocks))
        for aligned in range(cost, cost + self.min_cost + 1) if self.end_cost == 0 else ():
            whole = [-(-count // aligned) for count in tiles.tolist()]
            if self.units * sum(whole) <= blocks:
                costs, cost = np.array(whole) * aligned, aligned
                break
        cost_ends = np.cumsum(costs) * self.units
        bounds = np.minimum(np.arange(self.grid + 1) * cost, cost_ends[-1])
        row_of_bound = np.minimum(np.searchsorted(cost_ends, bounds, side="right"), len(tiles) - 1)
        cost_of_row, tiles_of_row = costs[row_of_bound], tiles[row_of_bound]
        inside = bounds - (cost_ends - costs * self.units)[row_of_bound]
        units = inside // cost_of_row
        starts = (ends - tiles * self.units)[row_of_bound]
        return starts + units * tiles_of_row + np.minimum(inside - units * cost_of_row, tiles_of_row)
