"""Selects a product's variant of kernels/skinny_product.cu: rows of x, split, stages. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 64
"""Rows of W in a tile."""
STEP = 64
"""Columns of W in a stage; the width of every matrix is a multiple of it."""
QUAD = 4
"""Outputs written at once; the number of outputs of every matrix is a multiple of it."""
THREADS = 192
"""Threads of a block: a warpgroup that multiplies, a warp that copies and one that reads the scales."""

_TOKENS = (8, 16, 32, 64, 128)
_SPLITS = (1, 2, 4, 8)
# About one for each multiprocessor.
_ENOUGH_BLOCKS = 128
# Bytes of a matrix from which on one block a multiprocessor is faster.
_LARGE_BYTES = 16 << 20
# Tiles from which on a product in one part keeps the memory busy.
_ENOUGH_TILES = 128
# Shared memory for all blocks of a multiprocessor, without the part that the driver reserves per block.
_SHARED_BYTES = 224 * 1024
_MAX_STAGES = 24


@dataclass(frozen=True, slots=True)
class SkinnyVariant:
    """Variant for products of up to `tokens` rows, with `split` blocks per tile and `blocks` per multiprocessor.

    With two blocks per multiprocessor the next product's rings fill while this one runs, but blocks may be unevenly
    spread over the multiprocessors: good for small matrices. A single block has a ring twice as long.
    """

    tokens: int
    split: int
    blocks: int
    parts: int = 1
    """Parts of the columns that a block of one split adds up itself, with the bits of as many splits."""
    canonical: bool = False
    """Whether bits depend on the matrix alone, not on `tokens`: docs/determinism.md."""

    @classmethod
    def choose(cls, blocks: int, num_tokens: int, num_rows: int, num_columns: int) -> SkinnyVariant:
        """Returns the variant for x of `num_tokens` rows and W [num_rows, num_columns]."""
        tokens = next(tokens for tokens in _TOKENS if tokens >= num_tokens)
        splits = [split for split in _SPLITS if split <= num_columns // STEP]
        enough = (split for split in splits if num_tiles(num_rows) * split >= _ENOUGH_BLOCKS)
        return cls(tokens, next(enough, splits[-1]), blocks)

    @classmethod
    def choose_canonical(cls, num_tokens: int, num_rows: int, num_columns: int) -> SkinnyVariant:
        """Returns the variant for the same product in the canonical order; more rows are tiles of as many."""
        blocks = 1 if 2 * num_rows * num_columns >= _LARGE_BYTES else 2
        tokens = next((tokens for tokens in _TOKENS if tokens >= num_tokens), _TOKENS[-1])
        return cls(tokens, canonical_parts(num_rows, num_columns), blocks, canonical=True)

    def grid(self, num_rows: int, row_tiles: int, multiprocessors: int) -> int:
        """Returns the number of blocks for W of `num_rows` rows and x of `row_tiles` times `tokens` rows."""
        whole = num_tiles(num_rows) * row_tiles * self.split
        if self.split > 1:
            return whole
        return min(whole, max(1, self.blocks * multiprocessors // row_tiles) * row_tiles)

    @property
    def _stage_bytes(self) -> int:
        return (TILE_ROWS + self.tokens) * 2 * STEP

    @property
    def _fixed_bytes(self) -> int:
        """Bytes of sums (rows padded by four floats) and scales."""
        return 4 * self.tokens * (TILE_ROWS + 4) + 4 * self.tokens

    @property
    def stages(self) -> int:
        """Stages per block, as many as fit, with two barriers of 8 bytes each."""
        return min(_MAX_STAGES, (_SHARED_BYTES // self.blocks - self._fixed_bytes) // (self._stage_bytes + 16))

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block."""
        return self.stages * (self._stage_bytes + 16) + self._fixed_bytes

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""
        canonical = {"CANONICAL": 1, "PARTS": self.parts} if self.canonical else {}
        return {"TOKENS": self.tokens, "SPLIT": self.split, "STAGES": self.stages, **canonical}


def num_tiles(num_rows: int) -> int:
    """Returns the number of tiles of a matrix of `num_rows` rows."""
    return -(-num_rows // TILE_ROWS)


def canonical_parts(num_rows: int, num_columns: int) -> int:
    """Returns into how many parts the canonical order cuts the columns of W [num_rows, num_columns].

    The bits of products depend on it: a change takes a new version of the order.
    """
    return 1 if num_tiles(num_rows) >= _ENOUGH_TILES or num_columns < 2 * STEP else 2
