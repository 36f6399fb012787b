"""Selects a variant of kernels/int4_product.cu: how W is divided among warpgroups. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

_TOKENS = (8, 16, 32, 64, 128)
_PARTS = (1, 2, 4, 8)
# Warpgroups with something to do, more than three for each multiprocessor.
_ENOUGH_WARPGROUPS = 440
# Tiles of a part of W's columns: with fewer, adding the parts takes longer than what they save.
_FEWEST_STEPS = 8
# Shared memory for all blocks of a multiprocessor, without the part that the driver reserves per block.
SHARED_BYTES = 224 * 1024
MAX_STAGES = 24
PITCH_PADDING = 4
"""Floats between tokens' sums, beside those of a tile's rows."""
_PITCH = 64 + PITCH_PADDING


@dataclass(frozen=True, slots=True)
class Int4Variant:
    """Products of up to `tokens` rows by blocks of `row_groups` tiles, whose columns have `parts * split` parts.

    Each of the `parts` is a warpgroup of a block, and each of the `split` a block of a cluster. Their number depends on
    the matrix alone, so that the order of additions does.
    """

    tokens: int
    row_groups: int
    parts: int
    split: int
    blocks: int  # of a multiprocessor
    tile_bytes: int
    launched: int = 0
    """Blocks of a multiprocessor that share all tiles; 0: `blocks`. With fewer, the next product starts early."""
    sharers: int = 1
    """Blocks of a cluster with the same columns and other tiles, which copy x for each other: 1 or 2."""
    prefetched: int = 0
    """Stages behind those in shared memory that are brought into L2 before the predecessors have ended."""
    by_warps: bool = False
    """Whether each warp multiplies on its own (mma.sync); otherwise, warpgroups do (wgmma). The bits are the same."""

    inputs: ClassVar[str] = "128s"
    """How x is given, as in `Kernel`: a map."""
    kernel: ClassVar[str] = "int4_product"
    outputs: ClassVar[int] = 64
    """Outputs of a tile for each row of x, where not gated."""

    @classmethod
    def choose(
        cls, blocks: int, num_tokens: int, tiles: int, steps: int, tile_bytes: int, epilogue: str = ""
    ) -> Int4Variant:
        """Returns the variant for x of `num_tokens` rows and W of `tiles` by `steps` tiles, the same for any epilogue.

        `blocks`, 1 or 2, chooses between two that are close to the fastest of those timed on an H200 in turn.
        """
        tokens = next(tokens for tokens in _TOKENS if tokens >= num_tokens)
        total = total_parts(tiles, steps)
        if tokens == _TOKENS[-1]:
            return cls._of_most_tokens(blocks, total, tile_bytes)
        if blocks == 1 and tokens == 64:
            parts = min(total, 2)
            return cls(tokens, 4 // parts, parts, total // parts, 1, tile_bytes)
        if blocks == 1 and total >= 4:
            return cls(tokens, 1, 4, total // 4, 1, tile_bytes)
        parts = min(total, 1 if tokens == 64 else 2)
        return cls(tokens, 2 // parts, parts, total // parts, 2, tile_bytes)

    @classmethod
    def timed(
        cls, blocks: int, num_tokens: int, tiles: int, steps: int, tile_bytes: int, epilogue: str = ""
    ) -> Int4Variant:
        """Returns what is timed at start as `blocks`: as `choose`, but the second of the fewest rows is by warps."""
        if blocks == 2 and num_tokens <= _TOKENS[0]:
            return replace(cls.choose(1, num_tokens, tiles, steps, tile_bytes), by_warps=True)
        return cls.choose(blocks, num_tokens, tiles, steps, tile_bytes)

    @classmethod
    def _of_most_tokens(cls, blocks: int, total: int, tile_bytes: int) -> Int4Variant:
        parts = 1 if blocks > 1 else min(total, 2)
        split = total // parts
        return cls(_TOKENS[-1], 2 // parts, parts, split, 1, tile_bytes, sharers=2 if split <= 4 else 1)

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block that multiply."""
        return self.row_groups * self.parts

    @property
    def threads(self) -> int:
        """Threads of a block: the warpgroups, a warp that copies and one that reads the scales of rows."""
        return self.warpgroups * 128 + 64

    @property
    def _stage_bytes(self) -> int:
        """Bytes of a stage, with two barriers."""
        return self.warpgroups * self.tile_bytes + self.parts * self.tokens * 256 + 16

    @property
    def _fixed_bytes(self) -> int:
        """Bytes of sums and scales."""
        return self.warpgroups * self.tokens * _PITCH * 4 + self.tokens * 4

    @property
    def stages(self) -> int:
        """Stages per block, as many as fit."""
        return min(MAX_STAGES, (SHARED_BYTES // self.blocks - self._fixed_bytes) // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block."""
        return self.stages * self._stage_bytes + self._fixed_bytes

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""
        return {
            "TOKENS": self.tokens,
            "ROW_GROUPS": self.row_groups,
            "PARTS": self.parts,
            "SPLIT": self.split,
            "BLOCKS": self.blocks,
            "STAGES": self.stages,
            "PREFETCHED": self.prefetched,
            "SHARERS": self.sharers,
            "BY_WARPS": int(self.by_warps),
        }

    @property
    def planes(self) -> int:
        """Planes of x that are copied at once."""
        return 2 // self.sharers

    def grid(self, tiles: int, multiprocessors: int, num_tokens: int) -> int:
        """Returns the number of blocks for W of `tiles` rows of tiles."""
        clusters, cluster = -(-tiles // (self.row_groups * self.sharers)), self.split * self.sharers
        if self.split == 1:
            clusters = min(clusters, (self.launched or self.blocks) * multiprocessors // cluster)
        return clusters * cluster


def total_parts(tiles: int, steps: int) -> int:
    """Returns the number of parts of the columns of a matrix of `tiles` by `steps` tiles."""
    possible = [parts for parts in _PARTS if parts * _FEWEST_STEPS <= steps] or [1]
    return next((parts for parts in possible if tiles * parts >= _ENOUGH_WARPGROUPS), possible[-1])
