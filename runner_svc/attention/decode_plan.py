"""The plan of a step's decode attention: which part of the work each block of threads does (kernels/paged_decode.cu).

Work is counted in tiles of 16 positions of one row for one unit (a key-value head with some of its query heads). The
tiles of a step lie on one line, cut into equal ranges over a fixed grid, so that load is balanced by work. A plan is
packed int32, made with some ten vectorised operations, and everything that changes from step to step is in it: the
launch itself depends only on the bucket. No CUDA is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TILE = 16
HEADER_WORDS = 8
ROW_WORDS = 8


@dataclass(frozen=True, slots=True)
class DecodePlanner:
    """Makes the plans of one bucket's batch, for layers of one window."""

    batch: int
    # Blocks of threads that run at once, and what each of them should have at least: a tile a warp.
    grid: int
    min_tiles: int
    # Key-value heads times the units each is split into.
    units: int
    window: int | None

    @property
    def words(self) -> int:
        """int32 words of a plan."""
        return HEADER_WORDS + ROW_WORDS * (self.batch + self.grid)

    def write(
        self,
        lengths: NDArray[np.int32],
        table_rows: NDArray[np.int32],
        query_rows: NDArray[np.int32],
        plan: NDArray[np.int32],
    ) -> None:
        """Fills `plan` [words] for rows of `lengths` positions each, this step's included; all arrays are [batch]."""
        firsts = np.zeros_like(lengths) if self.window is None else np.maximum(lengths - self.window, 0)
        tiles = np.maximum((lengths - firsts // TILE * TILE + TILE - 1) // TILE, 1)
        ends = np.cumsum(tiles)
        total = int(ends[-1]) * self.units
        tiles_per_block = max(self.min_tiles, -(-total // self.grid))
        plan[:2] = tiles_per_block, total
        rows = plan[HEADER_WORDS : HEADER_WORDS + ROW_WORDS * self.batch].reshape(self.batch, ROW_WORDS)
        rows[:, 0] = ends - tiles
        rows[:, 1] = tiles
        rows[:, 2] = lengths
        rows[:, 3] = firsts
        rows[:, 4] = table_rows
        rows[:, 5] = query_rows
        rows[:, 6] = np.arange(self.batch)
        begins = np.minimum(np.arange(self.grid) * tiles_per_block, total - 1)
        first_rows = rows[np.searchsorted(ends * self.units, begins, side="right")]
        plan[HEADER_WORDS + ROW_WORDS * self.batch : self.words] = first_rows.ravel()
