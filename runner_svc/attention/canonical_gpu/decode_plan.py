"""The plan of a step's decode attention in the canonical order: which block has which segments.

The unit of work is a segment: 256 positions of one row for one unit (a key-value head with some of its queries). The
segments of a step form one line (row, unit, segment), cut into ranges of about equal cost over a fixed grid. A cut may
fall within a (row, unit), never within a segment. The segments of a (row, unit) that is cut are stored one by one, and
its last block folds them (kernels/canonical_decode.cu). The bits of an output do not depend on the cuts.

Plans have the layout of `decode_plan`'s, with segments as tiles, and are made with vectorised operations, without CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner_svc.attention.canonical_gpu.variants import SEGMENT, SUB_TILE
from runner_svc.attention.decode_plan import (
    HEAD_FIRST_SLOT,
    RANGE_BEGIN,
    RANGE_END,
    ROW_WORDS,
    TAIL_FIRST_SLOT,
    DecodePlanner,
)

_SUB_TILES = SEGMENT // SUB_TILE
WHOLE = -1
"""First slot of a (row, unit) that one block has alone."""


@dataclass(frozen=True)
class CanonicalDecodePlanner(DecodePlanner):
    """Makes the plans for one bucket's batch size, for all layers with the same attention window."""

    # Segments that the workspace has room for.
    slots: int = 0

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
        segments = np.maximum(-(-lengths // SEGMENT) - seen // SEGMENT, 1)
        rows, starts = self._write_rows(lengths, seen, segments, table_rows, query_rows, plan)
        bounds = self._bounds_of(lengths, seen, segments, starts, blocks or self.grid)
        starts = starts * self.units
        row_of_bound = starts.searchsorted(np.minimum(bounds, bounds[-1] - 1), side="right") - 1
        own = segments[row_of_bound]
        # First segment of the (row, unit) that a bound cuts or begins.
        units = bounds - (bounds - starts[row_of_bound]) % own
        is_cut = (units < bounds) & (bounds < bounds[-1])
        slots = self._slots(units, is_cut, own)
        if slots is None:  # the workspace has no room: (row, unit)s go to the blocks in which they begin
            bounds, slots = units, np.full(len(bounds), WHOLE, np.int32)
            is_cut = np.zeros(len(bounds), bool)
            row_of_bound = starts.searchsorted(np.minimum(bounds, bounds[-1] - 1), side="right") - 1
        ranges = self._ranges(plan)
        ranges[:, :ROW_WORDS] = rows[row_of_bound[:-1]]
        ranges[:, RANGE_BEGIN], ranges[:, RANGE_END] = bounds[:-1], bounds[1:]
        # A range begins within a (row, unit), or with one that its own end cuts, or with a whole one.
        ends_in_first = is_cut[1:] & (units[1:] == bounds[:-1])
        ranges[:, HEAD_FIRST_SLOT] = np.where(is_cut[:-1], slots[:-1], np.where(ends_in_first, slots[1:], WHOLE))
        ranges[:, TAIL_FIRST_SLOT] = slots[1:]

    def _bounds_of(
        self,
        lengths: NDArray[np.int32],
        firsts: NDArray[np.int32] | np.int32,
        segments: NDArray[np.int32],
        starts: NDArray[np.int32],
        blocks: int,
    ) -> NDArray[np.int32]:
        """Returns the grid's bounds on the line of segments [grid + 1]: ranges of about equal numbers of sub-tiles."""
        indexes = np.minimum(np.arange(self.grid + 1), blocks)
        total = self.units * int(segments.sum())
        if total <= blocks:
            return np.minimum(indexes, total).astype(np.int32)
        costs = np.maximum(-(-lengths // SUB_TILE) - firsts // SUB_TILE, 1)
        head = np.minimum(_SUB_TILES - firsts // SUB_TILE % _SUB_TILES, costs)  # of the first segment
        begins = self.units * (np.cumsum(costs, dtype=np.int64) - costs)
        wanted = indexes * (self.units * int(costs.sum())) // blocks
        rows = begins.searchsorted(wanted, side="right") - 1
        units, inside = np.divmod(wanted - begins[rows], costs[rows])
        # Goes to the nearest bound of a segment.
        cut = np.where(2 * inside <= head[rows], 0, (inside - head[rows] + _SUB_TILES // 2) // _SUB_TILES + 1)
        bounds = starts[rows].astype(np.int64) * self.units + units * segments[rows] + np.minimum(cut, segments[rows])
        bounds[indexes == blocks] = total
        bounds[0] = 0
        return np.minimum(bounds, total).astype(np.int32)

    def _slots(
        self, units: NDArray[np.int32], is_cut: NDArray[np.bool_], segments: NDArray[np.int32]
    ) -> NDArray[np.int32] | None:
        """Returns the first slot of the (row, unit) that each bound cuts, or None if the workspace has no room.

        `units` are the first segments of the bounds' (row, unit)s, which have `segments`.
        """
        slots = np.full(len(units), WHOLE, np.int32)
        cut, sizes = units[is_cut], segments[is_cut]
        if len(cut):
            sizes = np.where(np.append(True, cut[1:] != cut[:-1]), sizes, 0)  # several bounds may cut one
            ends = np.cumsum(sizes)
            if ends[-1] > self.slots:
                return None
            own = np.maximum.accumulate(np.where(sizes > 0, ends - sizes, 0))
            slots[is_cut] = own
        return slots
