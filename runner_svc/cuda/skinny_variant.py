"""Which variant of kernels/skinny_product.cu a product gets: rows a tile, split, stages. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOKENS = 64
"""Rows of x, at most: beyond it cuBLAS's tiles are as good."""
STEP = 64
"""Columns of W in a stage; the widths of all matrices are multiples of it."""
QUAD = 4
"""Outputs written at once; the outputs of all matrices are multiples of it."""

_TOKENS = (8, 16, 32, 64)
_SPLITS = (1, 2, 4, 8)
# With this many blocks at work, each with its ring full, the memory has enough requests to be busy.
_ENOUGH_BLOCKS = 96
# Two blocks share a multiprocessor: the next product's ring fills while this one ends.
_SHARED_BYTES = 112 * 1024
_MAX_STAGES = 12


@dataclass(frozen=True, slots=True)
class SkinnyVariant:
    """Of a product of up to `tokens` rows."""

    tokens: int
    rows: int
    split: int

    @classmethod
    def choose(cls, num_tokens: int, num_rows: int, num_columns: int) -> SkinnyVariant:
        """For W [num_rows, num_columns]: large tiles read x less often, but all multiprocessors should have one."""
        tokens = next(tokens for tokens in _TOKENS if tokens >= num_tokens)
        variants = [
            cls(tokens, rows, split)
            for rows in (128, 64)
            for split in _SPLITS
            if split <= min(tokens, num_columns // STEP)
        ]
        enough = (variant for variant in variants if variant.num_tiles(num_rows) * variant.split >= _ENOUGH_BLOCKS)
        return next(enough, variants[-1])

    def num_tiles(self, num_rows: int) -> int:
        """Tiles of a matrix of so many rows."""
        return -(-num_rows // self.rows)

    @property
    def threads(self) -> int:
        """A warpgroup for each 64 rows, a warp that copies and one that reads the scales."""
        return 2 * self.rows + 64

    @property
    def _stage_bytes(self) -> int:
        return (self.rows + self.tokens) * 2 * STEP

    @property
    def _fixed_bytes(self) -> int:
        """Sums (rows padded by four floats) and scales."""
        return 4 * self.tokens * (self.rows + 4) + 4 * self.tokens

    @property
    def stages(self) -> int:
        """As many as fit, with two barriers of 8 bytes for each."""
        return min(_MAX_STAGES, (_SHARED_BYTES - self._fixed_bytes) // (self._stage_bytes + 16))

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return self.stages * (self._stage_bytes + 16) + self._fixed_bytes

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""
        return {"TOKENS": self.tokens, "ROWS": self.rows, "SPLIT": self.split, "STAGES": self.stages}
