"""Selects a variant of kernels/int4_product.cu: how W is divided among warpgroups. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass

_TOKENS = (8, 16, 32, 64, 128)
_PARTS = (1, 2, 4, 8)
# Warpgroups with something to do, about four for each multiprocessor.
_ENOUGH_WARPGROUPS = 256
# Shared memory for all blocks of a multiprocessor, without the part that the driver reserves per block.
_SHARED_BYTES = 224 * 1024
_MAX_STAGES = 24
_PITCH = 68
"""Floats between tokens' sums."""


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

    @classmethod
    def choose(cls, blocks: int, num_tokens: int, tiles: int, steps: int, tile_bytes: int) -> Int4Variant:
        """Returns the variant for x of `num_tokens` rows and W of `tiles` by `steps` tiles."""
        tokens = next(tokens for tokens in _TOKENS if tokens >= num_tokens)
        total = total_parts(tiles, steps)
        parts = min(total, 2)
        row_groups = 2 // parts
        if tokens >= 64:
            row_groups, blocks = (2, 1) if tokens > 64 or parts == 2 else (4, 1)
            parts = 1 if tokens > 64 else parts
        return cls(tokens, row_groups, parts, total // parts, blocks, tile_bytes)

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
        return min(_MAX_STAGES, (_SHARED_BYTES // self.blocks - self._fixed_bytes) // self._stage_bytes)

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
        }

    def grid(self, tiles: int, multiprocessors: int) -> int:
        """Returns the number of blocks for W of `tiles` rows of tiles."""
        clusters, cluster = -(-tiles // (self.row_groups * self.sharers)), self.split * self.sharers
        if self.split == 1:
            clusters = min(clusters, (self.launched or self.blocks) * multiprocessors // cluster)
        return clusters * cluster


def total_parts(tiles: int, steps: int) -> int:
    """Returns the number of parts of the columns of a matrix of `tiles` by `steps` tiles."""
    possible = [parts for parts in _PARTS if parts <= steps]
    return next((parts for parts in possible if tiles * parts >= _ENOUGH_WARPGROUPS), possible[-1])
