"""How decode and prefill attention of one step share the multiprocessors.

Decode waits for memory, prefill for the tensor cores: one behind the other, each leaves idle what the other needs. Side
by side, each has multiprocessors of its own, so many that both end together. No CUDA is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner_svc.attention.decode_plan import DecodePlanner
from runner_svc.attention.prefill_plan import PrefillPlanner

# What a tile of prefill takes one multiprocessor, in tiles of decode.
_PREFILL_TILE = 15.0
# More multiprocessors than these read no faster: the memory is busy.
_MAX_DECODE_SHARE = 0.7
# Blocks of decode come in pairs.
_PAIR = 2


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one position each, int32 [N]: their lengths with it, rows of the block tables, rows of the queries."""

    lengths: NDArray[np.int32]
    table_rows: NDArray[np.int32]
    query_rows: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows of `counts` positions from `starts`, int32 [R]; rows of the block tables, and of their first queries."""

    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    table_rows: NDArray[np.int32]
    query_rows: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class MixedPlanner:
    """Makes the plans of both for layers of one window; `heads` are those of queries."""

    decode: DecodePlanner
    prefill: PrefillPlanner
    heads: int

    def write(
        self, decode: DecodeRows, prefill: PrefillRows, decode_plan: NDArray[np.int32], prefill_plan: NDArray[np.int32]
    ) -> None:
        """Fills both plans; either kind may have no rows."""
        blocks = self.decode_blocks(decode, prefill)
        if blocks:
            self.decode.write(decode.lengths, decode.table_rows, decode.query_rows, decode_plan, blocks)
        else:
            decode_plan.fill(0)  # no work for anyone
        self.prefill.write(
            prefill.starts,
            prefill.counts,
            prefill.table_rows,
            prefill.query_rows,
            prefill_plan,
            self.prefill.grid - blocks,
        )

    def decode_blocks(self, decode: DecodeRows, prefill: PrefillRows) -> int:
        """Multiprocessors for decode: an even number, and at most a part of all."""
        if not len(decode.lengths):
            return 0
        grid = self.prefill.grid
        decode_cost = self.decode.cost(decode.lengths)
        prefill_cost = _PREFILL_TILE * self.heads * self.prefill.key_tiles(prefill.starts, prefill.counts)
        balanced = grid * decode_cost / (decode_cost + prefill_cost)
        idle = grid - self.heads * self.prefill.num_tiles(prefill.counts)
        most = _MAX_DECODE_SHARE * grid
        return _PAIR * max(1, round(min(max(balanced, idle), most) / _PAIR))
