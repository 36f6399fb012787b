"""Which variant of kernels/skinny_product.cu a product gets: rows of x, split, stages. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 64
"""Rows of W in a tile."""
STEP = 64
"""Columns of W in a stage; the widths of all matrices are multiples of it."""
QUAD = 4
"""Outputs written at once; the outputs of all matrices are multiples of it."""
THREADS = 192
"""A warpgroup that multiplies, a warp that copies and one that reads the scales."""

_TOKENS = (8, 16, 32, 64, 128)
_SPLITS = (1, 2, 4, 8)
# Each multiprocessor should have one.
_ENOUGH_BLOCKS = 128
# Of a multiprocessor: what its blocks can have together, less what the driver keeps of each.
_SHARED_BYTES = 224 * 1024
_MAX_STAGES = 24


@dataclass(frozen=True, slots=True)
class SkinnyVariant:
    """Of a product of up to `tokens` rows, `split` blocks sharing a tile.

    With two `blocks` a multiprocessor the next product's rings fill while this one runs, but blocks may crowd on some
    multiprocessors: good for small matrices. One has a ring twice as long.
    """

    tokens: int
    split: int
    blocks: int

    @classmethod
    def choose(cls, blocks: int, num_tokens: int, num_rows: int, num_columns: int) -> SkinnyVariant:
        """For x of `num_tokens` rows and W [num_rows, num_columns]."""
        tokens = next(tokens for tokens in _TOKENS if tokens >= num_tokens)
        splits = [split for split in _SPLITS if split <= num_columns // STEP]
        enough = (split for split in splits if num_tiles(num_rows) * split >= _ENOUGH_BLOCKS)
        return cls(tokens, next(enough, splits[-1]), blocks)

    @property
    def _stage_bytes(self) -> int:
        return (TILE_ROWS + self.tokens) * 2 * STEP

    @property
    def _fixed_bytes(self) -> int:
        """Sums (rows padded by four floats) and scales."""
        return 4 * self.tokens * (TILE_ROWS + 4) + 4 * self.tokens

    @property
    def stages(self) -> int:
        """As many as fit, with two barriers of 8 bytes for each."""
        return min(_MAX_STAGES, (_SHARED_BYTES // self.blocks - self._fixed_bytes) // (self._stage_bytes + 16))

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return self.stages * (self._stage_bytes + 16) + self._fixed_bytes

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""
        return {"TOKENS": self.tokens, "SPLIT": self.split, "STAGES": self.stages}


def num_tiles(num_rows: int) -> int:
    """Tiles of a matrix of so many rows."""
    return -(-num_rows // TILE_ROWS)
