"""Selects a product's variant of kernels/fp8_product.cu: rows of x, parts, stages. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass, replace

STEP = 128
"""Columns of W in a step."""
QUAD = 4
"""Outputs written at once; the number of outputs of every matrix is a multiple of it."""
TILE_ROWS = 64
"""Rows of W of a warpgroup."""

_TOKENS = (8, 16, 32, 64, 128)
_SPLITS = (1, 2, 4, 8)
# About one for each multiprocessor.
_ENOUGH_BLOCKS = 128
# Blocks from which tiles of two warpgroups keep the memory busy: they read x half as often.
_ENOUGH_LARGE_BLOCKS = 96
# Shared memory for all blocks of a multiprocessor, without the part that the driver reserves per block.
_SHARED_BYTES = 224 * 1024
_MAX_STAGES = 24
# Steps of a block whose groups' scales fit in shared memory beside a ring.
_MOST_SCALES = 64
MOST_GROUPED_COLUMNS = _SPLITS[-1] * _MOST_SCALES * STEP
"""Most columns of a matrix with scales of groups."""
_FEWEST_STAGES = 4
# Steps of a block above which a long ring is better than a second block.
_LONG = 32
# Up to this number, rows are rounded in the product.
_FEWEST_ROWS = 2


def num_steps(num_columns: int) -> int:
    """Returns the steps of a matrix of `num_columns` columns."""
    return -(-num_columns // STEP)


def split_of(num_rows: int, num_columns: int, *, grouped: bool) -> int:
    """Returns the parts in which the columns of a matrix [num_rows, num_columns] are added up, whatever is multiplied.

    A row's bits depend on it, so it depends on nothing else.
    """
    steps, tiles = num_steps(num_columns), -(-num_rows // TILE_ROWS)
    splits = [split for split in _SPLITS if split <= steps]
    if grouped:
        splits = [split for split in splits if steps <= split * _MOST_SCALES] or splits[-1:]
    return next((split for split in splits if tiles * split >= _ENOUGH_BLOCKS), splits[-1])


@dataclass(frozen=True, slots=True)
class Fp8Variant:
    """Variant for products of up to `tokens` rows with a matrix of `steps` steps a block.

    `split` blocks share a tile; `groups` are warpgroups of a block, `batch` the steps whose products are in flight, and
    `blocks` the blocks per multiprocessor. A `resident` block rounds x itself and keeps it.
    """

    tokens: int
    split: int
    steps: int
    grouped: bool
    resident: bool = False
    groups: int = 1
    batch: int = 2
    blocks: int = 2

    @classmethod
    def choose(
        cls, blocks: int, num_tokens: int, num_rows: int, num_columns: int, *, grouped: bool = False
    ) -> Fp8Variant:
        """Returns the variant for x of `num_tokens` rows and W [num_rows, num_columns]."""
        tokens = next(tokens for tokens in _TOKENS if tokens >= num_tokens)
        split = split_of(num_rows, num_columns, grouped=grouped)
        steps = -(-num_steps(num_columns) // split)
        if tokens > 32:
            groups = 2 if -(-num_rows // (2 * TILE_ROWS)) * split >= _ENOUGH_LARGE_BLOCKS else 1
            return cls(tokens, split, steps, grouped, groups=groups, batch=2 if tokens == 64 else 1, blocks=1)
        variant = cls(tokens, split, steps, grouped, blocks=1 if split > 1 and steps > _LONG else blocks)
        resident = replace(variant, resident=True)
        return resident if split == 1 and num_tokens <= _FEWEST_ROWS and resident.stages >= _FEWEST_STAGES else variant

    @classmethod
    def choose_canonical(cls, num_tokens: int, num_rows: int, num_columns: int, *, grouped: bool = False) -> Fp8Variant:
        """Returns the variant for the same product in the canonical order, for which rows are rounded before it."""
        return replace(cls.choose(1, num_tokens, num_rows, num_columns, grouped=grouped), resident=False)

    @property
    def tile_rows(self) -> int:
        """Rows of W in a tile."""
        return TILE_ROWS * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, a warp that copies and one that reads factors."""
        return 128 * self.groups + 64

    @property
    def _stage_bytes(self) -> int:
        return STEP * (self.tile_rows + (0 if self.resident else self.tokens))

    @property
    def _fixed_bytes(self) -> int:
        """Bytes of resident inputs, sums (rows padded by four floats), four words a token, and scales of groups."""
        resident = STEP * self.tokens * self.steps if self.resident else 0
        groups = 4 * self.tokens * self.steps if self.grouped else 0
        return resident + 4 * self.tokens * (self.tile_rows + 4) + 16 * self.tokens + groups

    @property
    def stages(self) -> int:
        """Stages per block, as many as fit, with two barriers of 8 bytes each; fewer than 1 if nothing fits."""
        return min(_MAX_STAGES, (_SHARED_BYTES // self.blocks - self._fixed_bytes) // (self._stage_bytes + 16))

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block."""
        return self.stages * (self._stage_bytes + 16) + self._fixed_bytes

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros, without those of the launch."""
        return {
            "TOKENS": self.tokens,
            "SPLIT": self.split,
            "STEPS": self.steps if self.resident or self.grouped else 1,  # otherwise it does not matter
            "GROUPED": int(self.grouped),
            "RESIDENT": int(self.resident),
            "GROUPS": self.groups,
            "BATCH": self.batch,
            "STAGES": self.stages,
        }
