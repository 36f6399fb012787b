"""Selects a product's variant of kernels/fp8_many.cu: tiles, clusters, parts. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass, replace

TILE_ROWS = 128
"""Rows of x in a tile."""
STEP = 128
"""Columns of x in a stage."""
VECTOR = 8
"""The number of outputs is a multiple of it."""

_GATED_COLUMNS = (96, 112, 128, 160)
_COLUMNS = (64, 96, 112, 128)
_SPLIT_COLUMNS = 128
# Matrices with at most this many outputs are added up in two parts: a tile for each multiprocessor would be too small.
_MOST_SPLIT_OUTPUTS = 4224
# Registers hold the sums of two steps in flight up to this number of columns.
_MOST_BATCHED = 128
_SHARED_BYTES = 227 * 1024
_BARRIER_BYTES = 16
# Overhead of a step, in columns of a tile, and of a tile, in steps.
_STEP_COST, _TILE_COST = 16, 4


@dataclass(frozen=True, slots=True)
class Fp8ManyVariant:
    """Tiles of 128 rows of x by `columns` rows of W, half of them gate and half up if `gated`.

    A cluster has `cluster_rows` by `cluster_columns` tiles in `split` parts of W's columns.
    """

    columns: int
    gated: bool
    grouped: bool
    cluster_rows: int = 1
    cluster_columns: int = 1
    split: int = 1
    head_start: int = 2

    @classmethod
    def choose(
        cls, multiprocessors: int, num_tokens: int, num_outputs: int, width: int, *, gated: bool, grouped: bool
    ) -> Fp8ManyVariant:
        """Returns the variant whose last block ends first. The parts depend on the matrix alone."""
        rows = -(-num_tokens // TILE_ROWS)
        cluster_rows = 2 if rows % 2 == 0 else 1
        split = 2 if not gated and num_outputs <= _MOST_SPLIT_OUTPUTS and width >= 2 * STEP else 1
        sizes = _GATED_COLUMNS if gated else _COLUMNS if split == 1 else (_SPLIT_COLUMNS,)
        variants = [cls(columns, gated, grouped, cluster_rows, 1, split) for columns in sizes]
        return min(variants, key=lambda variant: variant.cost(multiprocessors, num_tokens, num_outputs, width))

    def cost(self, multiprocessors: int, num_tokens: int, num_outputs: int, width: int) -> float:
        """Returns the cost of a product of `num_tokens` rows, in columns of a tile times steps."""
        rounds = -(-self.count(num_tokens, num_outputs) // (multiprocessors // self.cluster))
        steps = -(-width // (STEP * self.split)) + _TILE_COST
        return rounds * steps * (self.columns + _STEP_COST)

    def clusters(self, multiprocessors: int, num_tokens: int, num_outputs: int) -> int:
        """Returns the clusters to launch: as few as end in as many rounds as all that fit, or one for each tile.

        A multiprocessor may be left over where clusters do not divide those of a part of the GPU.
        """
        count = self.count(num_tokens, num_outputs)
        if self.split > 1:
            return count
        rounds = -(-count // (multiprocessors // self.cluster))
        return -(-count // rounds)

    def tiles(self, num_tokens: int, num_outputs: int) -> tuple[int, int]:
        """Returns the number of rows and of columns of clusters."""
        outputs = (self.columns // 2 if self.gated else self.columns) * self.cluster_columns
        return -(-num_tokens // (TILE_ROWS * self.cluster_rows)), -(-num_outputs // outputs)

    def count(self, num_tokens: int, num_outputs: int) -> int:
        """Returns the number of clusters' tiles."""
        rows, columns = self.tiles(num_tokens, num_outputs)
        return rows * columns

    def unclustered(self) -> Fp8ManyVariant:
        """Returns the variant in which each block copies for itself alone."""
        return replace(self, cluster_rows=1, cluster_columns=1)

    @property
    def cluster(self) -> int:
        """Blocks per cluster."""
        return self.cluster_rows * self.cluster_columns * self.split

    @property
    def batch(self) -> int:
        """Steps whose products are in flight."""
        return 2 if self.columns <= _MOST_BATCHED else 1

    @property
    def threads(self) -> int:
        """Threads per block: two warpgroups that multiply, and one that copies."""
        return 384

    @property
    def input_rows(self) -> int:
        """Rows of x that a block copies at once."""
        return TILE_ROWS // self.cluster_columns

    @property
    def weight_rows(self) -> int:
        """Rows of W that a block copies at once."""
        return self.columns // 2

    @property
    def _stage_bytes(self) -> int:
        return (TILE_ROWS + self.columns) * STEP

    @property
    def _scales_bytes(self) -> int:
        return 2 * 4 * self.columns

    @property
    def stages(self) -> int:
        """Stages per block, as many as fit."""
        return (_SHARED_BYTES - self._scales_bytes) // (self._stage_bytes + _BARRIER_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block: stages with their barriers, and the scales of a tile's columns."""
        return self.stages * (self._stage_bytes + _BARRIER_BYTES) + self._scales_bytes

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros, without the activation."""
        return {
            "COLUMNS": self.columns,
            "GATED": int(self.gated),
            "GROUPED": int(self.grouped),
            "STAGES": self.stages,
            "BATCH": self.batch,
            "CLUSTER_ROWS": self.cluster_rows,
            "CLUSTER_COLUMNS": self.cluster_columns,
            "SPLIT": self.split,
            "HEAD_START": self.head_start,
        }
