"""Plans how the decode and prefill attention of one step share the GPU's multiprocessors.

Decode is limited by memory bandwidth and prefill by the tensor cores: if they run one after the other, each leaves idle
what the other needs. If they run concurrently, each gets its own multiprocessors, divided so that the later of the two
ends as early as possible. Prefill consists of few, large pieces (one per tile and query head), so with one
multiprocessor less it may take one more round of pieces. If sharing is not predicted to be faster, both use all
multiprocessors in turn: a prefill block starts on a multiprocessor when its decode block has ended. No CUDA is imported
here.
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

# Fitted to times of an H200 with heads of 128 (`bench.kernels.mixed_attention`). Times are in tiles of decode.
# Time of a multiprocessor for a piece of prefill: per 128 keys, and per piece.
_KEY_TILE, _PIECE = 17.5, 9.0
# Delay between the two when run in turn, and the factor by which prefill is slower beside decode.
_BEGIN, _BESIDE = 50.0, 1.1
# All multiprocessors together read only as fast as this share of them would without contention. The share is larger for
# FP8: one multiprocessor takes as long for a tile although it has half the bytes.
_READING_SHARE, _READING_SHARE_FP8 = 0.43, 0.8


@dataclass(frozen=True, slots=True)
class MixedPlanner:
    """Makes the plans of both kinds for all layers with the same window; `heads` is the number of query heads."""

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
            decode_plan.fill(0)  # no work for any block
            return
        blocks = self.decode_blocks(
            self.decode.cost(decode.lengths, decode.firsts), self.prefill.key_tiles(prefill_plan)
        )
        # Decode blocks come in pairs: an odd number of multiprocessors leaves one without decode.
        own = min(blocks, self.decode.grid)
        self.decode.write(decode.lengths, decode.table_rows, decode.query_rows, decode_plan, own, decode.firsts)
        if blocks < self.prefill.grid:
            self.prefill.deal(prefill_plan, self.prefill.grid - blocks)

    def decode_blocks(self, decode_cost: int, key_tiles: NDArray[np.int32]) -> int:
        """Returns the number of multiprocessors for decode: an even number, or all.

        `decode_cost` is in tiles of decode; `key_tiles` has the key tiles of each prefill tile in descending order.
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
    """C candidate ways to share a grid; in the last one both kinds use all of it in turn."""

    decode_blocks: NDArray[np.int64]  # [C]
    readers: NDArray[np.float64]  # [C]: decode's speed, in blocks without contention
    # [2, C, rounds]: indices of the sorted pieces that prefill's first and last block take. The later of the two ends
    # about last of all blocks.
    dealt: NDArray[np.int64]

    def times(self, pieces: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns prefill's duration [C]; `pieces` are the times of its pieces in descending order."""
        padded = np.append(pieces, 0.0)
        taken: NDArray[np.float64] = padded.take(self.dealt, mode="clip").sum(axis=2).max(axis=0)
        return taken


@lru_cache(maxsize=256)
def _dealing(grid: int, rounds: int, reading_share: float) -> _Dealing:
    """Returns the candidates for pieces that fill `rounds` rounds of the whole grid."""
    decode_blocks = np.append(np.arange(BLOCKS_BESIDE_PREFILL, grid * 3 // 4, BLOCKS_BESIDE_PREFILL), grid)
    workers = np.where(decode_blocks < grid, grid - decode_blocks, grid)[:, None]
    # The smallest share of prefill needs the most rounds.
    turns = np.arange(-(-rounds * grid // int(workers.min())))
    begins = turns * workers
    ends = begins + workers - 1
    odd = turns % 2 == 1
    dealt = np.stack((np.where(odd, ends, begins), np.where(odd, begins, ends)))
    readers = decode_blocks * (1 + (decode_blocks / (reading_share * grid)) ** 4) ** -0.25
    return _Dealing(decode_blocks, readers, dealt)
