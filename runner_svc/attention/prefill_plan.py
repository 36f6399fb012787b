"""The plan of a step's prefill attention: tiles of queries, the longest first (kernels/paged_prefill*.cu).

A tile is up to `tile_rows` adjacent queries of one row of the step; each query head of a tile is one piece of work.
Pieces are dealt to all or some blocks of a fixed grid in alternating directions, which balances long and short ones. A
plan is packed int32, made with vectorised operations, without CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HEADER_WORDS = 8
TILE_WORDS = 8
# Columns of a tile: the fields of `PrefillTile` in kernels/prefill_tile.cuh.
_QUERY, _ROWS, _POSITION, _FIRST, _LENGTH, _TABLE = range(6)
# Words of the header.
NUM_TILES, NUM_BLOCKS = range(2)
# Unit in which a tile's keys are counted, for the order of tiles and for costs; a kernel may process fewer at once.
KEYS = 128


@dataclass(frozen=True, slots=True)
class PrefillPlanner:
    """Makes the prefill plans of all layers with the same attention window (`window`; None: no limit)."""

    tile_rows: int
    window: int | None
    # Thread blocks that run at once.
    grid: int

    def max_words(self, num_tokens: int, num_rows: int) -> int:
        """Returns the maximum size, in int32 words, of a plan for `num_rows` rows of `num_tokens` in total."""
        return HEADER_WORDS + TILE_WORDS * (num_tokens // self.tile_rows + num_rows)

    def write(
        self,
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        table_rows: NDArray[np.int32],
        query_rows: NDArray[np.int32],
        plan: NDArray[np.int32],
    ) -> int:
        """Fills `plan` for rows of `counts` positions from `starts` with first queries `query_rows`; all are [R].

        Returns the number of words used.
        """
        tiles_of_row = -(-counts // self.tile_rows)
        ends = np.cumsum(tiles_of_row)
        num_tiles = int(ends[-1]) if len(ends) else 0
        rows = np.repeat(np.arange(len(counts)), tiles_of_row)
        offsets = (np.arange(num_tiles) - (ends - tiles_of_row)[rows]) * self.tile_rows
        positions = starts[rows] + offsets
        sizes = np.minimum(counts[rows] - offsets, self.tile_rows)
        firsts = np.zeros_like(positions) if self.window is None else np.maximum(positions - (self.window - 1), 0)
        order = np.argsort(firsts // KEYS - (positions + sizes + KEYS - 1) // KEYS, kind="stable")
        words = HEADER_WORDS + TILE_WORDS * num_tiles
        plan[NUM_TILES], plan[NUM_BLOCKS] = num_tiles, self.grid
        tiles = plan[HEADER_WORDS:words].reshape(num_tiles, TILE_WORDS)
        tiles[:, _QUERY] = (query_rows[rows] + offsets)[order]
        tiles[:, _ROWS] = sizes[order]
        tiles[:, _POSITION] = positions[order]
        tiles[:, _FIRST] = firsts[order]
        tiles[:, _LENGTH] = (starts + counts)[rows][order]
        tiles[:, _TABLE] = table_rows[rows][order]
        return words

    def key_tiles(self, plan: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the number of KEYS-sized key tiles that each tile of a plan sees, in descending order."""
        tiles = plan[HEADER_WORDS : HEADER_WORDS + TILE_WORDS * int(plan[NUM_TILES])].reshape(-1, TILE_WORDS)
        return (tiles[:, _POSITION] + tiles[:, _ROWS] + (KEYS - 1)) // KEYS - tiles[:, _FIRST] // KEYS

    def deal(self, plan: NDArray[np.int32], blocks: int) -> None:
        """Assigns all work of a plan to the first `blocks` of the grid."""
        plan[NUM_BLOCKS] = blocks
