"""Selects a product's variant of kernels/fp8_many.cu, where that is faster than torch. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass

MOST_ROWS = 256
"""Rows up to which there are variants."""
TILE_ROWS = 128
"""Rows of x in a tile."""
STEP = 128
"""Columns of x in a stage."""
VECTOR = 8
"""The number of outputs is a multiple of it."""

_GATED_COLUMNS, _COLUMNS = 112, 128
# Matrices with at most this many outputs have too few tiles for the GPU: they are added up in two parts.
_MOST_SPLIT_OUTPUTS = 4224
_SHARED_BYTES = 227 * 1024
_BARRIER_BYTES = 16


@dataclass(frozen=True, slots=True)
class Fp8ManyVariant:
    """Tiles of 128 rows of x by `columns` rows of W, half of them gate and half up if `gated`.

    A cluster has `cluster_rows` tiles with the same weights, or the `split` parts of a tile.
    """

    columns: int
    gated: bool
    grouped: bool
    cluster_rows: int = 1
    split: int = 1

    @classmethod
    def choose(
        cls, num_tokens: int, num_outputs: int, width: int, *, gated: bool, grouped: bool
    ) -> Fp8ManyVariant | None:
        """Returns the variant; None where torch's product is as fast, by times on an H200 (8B's shape).

        The parts depend on the matrix alone.
        """
        rows = -(-num_tokens // TILE_ROWS)
        if rows > MOST_ROWS // TILE_ROWS:
            return None
        if gated:
            return None if grouped else cls(_GATED_COLUMNS, gated, grouped, cluster_rows=rows)
        few_outputs = num_outputs <= _MOST_SPLIT_OUTPUTS and width >= 2 * STEP
        if rows == 2 and few_outputs and (grouped or width >= 2 * num_outputs):
            return cls(_COLUMNS, gated, grouped, split=2)
        return None

    def clusters(self, multiprocessors: int, num_tokens: int, num_outputs: int) -> int:
        """Returns the clusters to launch: as few as end in as many rounds as all that fit, or one for each tile."""
        count = self._count(num_tokens, num_outputs)
        if self.split > 1:
            return count
        rounds = -(-count // (multiprocessors // self.cluster))
        return -(-count // rounds)

    def tiles(self, num_tokens: int, num_outputs: int) -> tuple[int, int]:
        """Returns the number of rows and of columns of clusters."""
        outputs = self.columns // 2 if self.gated else self.columns
        return -(-num_tokens // (TILE_ROWS * self.cluster_rows)), -(-num_outputs // outputs)

    def _count(self, num_tokens: int, num_outputs: int) -> int:
        rows, columns = self.tiles(num_tokens, num_outputs)
        return rows * columns

    @property
    def cluster(self) -> int:
        """Blocks per cluster."""
        return self.cluster_rows * self.split

    @property
    def threads(self) -> int:
        """Threads per block: two warpgroups that multiply, and one that copies."""
        return 384

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
        """Shared memory per block: stages with their barriers, and the scales of a tile's columns, twice."""
        return self.stages * (self._stage_bytes + _BARRIER_BYTES) + self._scales_bytes

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros, without the activation."""
        return {
            "COLUMNS": self.columns,
            "GATED": int(self.gated),
            "GROUPED": int(self.grouped),
            "STAGES": self.stages,
            "CLUSTER_ROWS": self.cluster_rows,
            "SPLIT": self.split,
        }
