"""How decode and prefill attention of one step share the multiprocessors.

Decode waits for memory, prefill for the tensor cores: one behind the other, each leaves idle what the other needs. Side
by side, each has multiprocessors of its own, so many that the later one ends as early as it can. Prefill's pieces are
few and large, so that one multiprocessor less may cost a whole round of them: then decode takes all of them, and
prefill's blocks begin where those of decode end. No CUDA is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from runner_svc.attention.cuda_kernels import BLOCKS_BESIDE_PREFILL
from runner_svc.attention.decode_plan import DecodePlanner
from runner_svc.attention.prefill_plan import PrefillPlanner
from runner_svc.interface.attention_launcher import DecodeRows, PrefillRows

# Fitted to times of an H200 with heads of 128 (`bench.kernels.mixed_attention`).
# What a piece of prefill takes a multiprocessor, in tiles of decode: for each 128 keys, and beside that.
_KEY_TILE, _PIECE = 17.5, 9.0
# What it takes to begin again where one comes behind the other, and how much longer prefill takes beside decode.
_BEGIN, _BESIDE = 50.0, 1.1
# All multiprocessors together read no faster than this share of them would, if none was in another's way: a tile takes
# one of them as long with half the bytes.
_READING_SHARE, _READING_SHARE_FP8 = 0.43, 0.8


@dataclass(frozen=True, slots=True)
class MixedPlanner:
    """Makes the plans of both for layers of one window; `heads` are those of queries."""

    decode: DecodePlanner
    prefill: PrefillPlanner
    heads: int
    fp8_cache: bool = False

    def write(
        self, decode: DecodeRows, prefill: PrefillRows, decode_plan: NDArray[np.int32], prefill_plan: NDArray[np.int32]
    ) -> None:
        """Fills both plans; either kind may have no rows."""
        self.prefill.write(prefill.starts, prefill.counts, prefill.table_rows, prefill.query_rows, prefill_plan)
        if not len(decode.lengths):
            decode_plan.fill(0)  # no work for anyone
            return
        blocks = self.decode_blocks(self.decode.cost(decode.lengths), self.prefill.key_tiles(prefill_plan))
        # Pairs of blocks leave the last one of an odd number of multiprocessors without decode.
        own = min(blocks, self.decode.grid)
        self.decode.write(decode.lengths, decode.table_rows, decode.query_rows, decode_plan, own)
        if blocks < self.prefill.grid:
            self.prefill.deal(prefill_plan, self.prefill.grid - blocks)

    def decode_blocks(self, decode_cost: int, key_tiles: NDArray[np.int32]) -> int:
        """Multiprocessors for decode, an even number or all.

        `decode_cost` is in tiles of decode; `key_tiles` has those of each of prefill's tiles, the most first.
        """
        if not len(key_tiles):
            return self.prefill.grid
        pieces = np.repeat(key_tiles * _KEY_TILE + _PIECE, self.heads)
        reading_share = _READING_SHARE_FP8 if self.fp8_cache else _READING_SHARE
        dealing = _dealing(self.prefill.grid, -(-len(pieces) // self.prefill.grid), reading_share)
        decode_times = decode_cost / dealing.readers
        prefill_times = dealing.times(pieces)
        times = np.maximum(decode_times, _BESIDE * prefill_times)
        times[-1] = decode_times[-1] + prefill_times[-1] + _BEGIN
        return int(dealing.decode_blocks[times.argmin()])


@dataclass(frozen=True, slots=True)
class _Dealing:
    """What each of C ways to share a grid means; the last one is that both have all of it in turn."""

    decode_blocks: NDArray[np.int64]  # [C]
    readers: NDArray[np.float64]  # [C]: as fast as so many of decode's blocks, each alone
    # [2, C, rounds]: the pieces that the first and the last of prefill's blocks take, of sorted ones. The later of the
    # two ends about last of all.
    dealt: NDArray[np.int64]

    def times(self, pieces: NDArray[np.float64]) -> NDArray[np.float64]:
        """When prefill is done, [C]; `pieces` are their times, the longest first."""
        padded = np.append(pieces, 0.0)
        taken: NDArray[np.float64] = padded.take(self.dealt, mode="clip").sum(axis=2).max(axis=0)
        return taken


@lru_cache(maxsize=256)
def _dealing(grid: int, rounds: int, reading_share: float) -> _Dealing:
    """Of pieces for so many rounds of the whole grid."""
    decode_blocks = np.append(np.arange(BLOCKS_BESIDE_PREFILL, grid * 3 // 4, BLOCKS_BESIDE_PREFILL), grid)
    workers = np.where(decode_blocks < grid, grid - decode_blocks, grid)[:, None]
    # The fewest multiprocessors that prefill may have need the most rounds.
    turns = np.arange(-(-rounds * grid // int(workers.min())))
    begins = turns * workers
    ends = begins + workers - 1
    odd = turns % 2 == 1
    dealt = np.stack((np.where(odd, ends, begins), np.where(odd, begins, ends)))
    readers = decode_blocks * (1 + (decode_blocks / (reading_share * grid)) ** 4) ** -0.25
    return _Dealing(decode_blocks, readers, dealt)
