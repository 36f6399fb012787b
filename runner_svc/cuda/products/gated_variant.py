"""Selects a product's variant of kernels/gated_product.cu: tiles, clusters, stages. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass

CONSUMER_ROWS = 64
"""Rows of x that a warpgroup multiplies; the choice changes only at multiples of it."""
STEP = 64
"""Columns of x in a stage; the width of x is a multiple of it."""
VECTOR = 8
"""Outputs written at once; the number of outputs is a multiple of it."""
TILES = ((2, 48), (2, 64), (2, 80), (2, 96), (2, 112), (2, 128), (3, 96), (3, 112))
"""Tile shapes: warpgroups that multiply, and outputs, for each of which a row of G and a row of U are read."""

# Per block.
_SHARED_BYTES = 227 * 1024
_BARRIER_BYTES = 16
# Fitted to times of both shapes of the benchmarks on an H200: overhead of a step besides its products, in outputs of a
# warpgroup; overhead of a tile besides its steps; and the factor by which blocks that don't share weights are slower.
_STEP_COST, _TILE_COST, _OWN_WEIGHTS = 8, 640, 1.02
# Rows of tiles that are processed together: their x stays in L2 while the weights are streamed.
_GROUP = 16


@dataclass(frozen=True, slots=True)
class GatedVariant:
    """Tiles of `consumers` times 64 rows by `columns` outputs, `cluster_rows` by `cluster_columns` tiles in a cluster.

    One warpgroup starts `head_start` stages ahead of the others.
    """

    consumers: int
    columns: int
    cluster_rows: int
    cluster_columns: int
    head_start: int = 2
    group_rows: int = _GROUP

    @classmethod
    def choose(cls, multiprocessors: int, num_tokens: int, num_outputs: int, width: int) -> GatedVariant:
        """Returns the variant whose last block ends first: blocks process tiles in rounds of equal duration."""
        variants = [
            cls(consumers, columns, *cluster_of(-(-num_tokens // (consumers * CONSUMER_ROWS))))
            for consumers, columns in TILES
        ]
        return min(variants, key=lambda variant: variant.cost(multiprocessors, num_tokens, num_outputs, width))

    def cost(self, multiprocessors: int, num_tokens: int, num_outputs: int, width: int) -> float:
        """Returns the cost of a product of `num_tokens` rows, in outputs of a warpgroup for each step."""
        rows, columns = self.tiles(num_tokens, num_outputs)
        rounds = -(-rows * columns // (multiprocessors // self.cluster))
        tile = self.consumers * self.columns + _STEP_COST + _TILE_COST * STEP / width
        return rounds * tile * (1 if self.cluster_rows > 1 else _OWN_WEIGHTS)

    @property
    def cluster(self) -> int:
        """Blocks per cluster."""
        return self.cluster_rows * self.cluster_columns

    @property
    def rows(self) -> int:
        """Rows of x in a tile."""
        return self.consumers * CONSUMER_ROWS

    @property
    def threads(self) -> int:
        """Threads per block: the warpgroups that multiply, and one that copies."""
        return (self.consumers + 1) * 128

    @property
    def _stage_bytes(self) -> int:
        return (self.rows + 2 * self.columns) * 2 * STEP

    @property
    def stages(self) -> int:
        """Stages per block, as many as fit."""
        return _SHARED_BYTES // (self._stage_bytes + _BARRIER_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block."""
        return self.stages * (self._stage_bytes + _BARRIER_BYTES)

    @property
    def input_rows(self) -> int:
        """Rows of x that a block copies at once."""
        return self.rows // self.cluster_columns

    @property
    def group(self) -> int:
        """Rows of clusters that are processed together."""
        return self.group_rows // self.cluster_rows

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""
        return {
            "CONSUMERS": self.consumers,
            "COLUMNS": self.columns,
            "STAGES": self.stages,
            "CLUSTER_ROWS": self.cluster_rows,
            "CLUSTER_COLUMNS": self.cluster_columns,
            "HEAD_START": self.head_start,
        }

    def tiles(self, num_tokens: int, num_outputs: int) -> tuple[int, int]:
        """Returns the number of rows and of columns of clusters."""
        rows = -(-num_tokens // (self.rows * self.cluster_rows))
        return rows, -(-num_outputs // (self.columns * self.cluster_columns))


def cluster_of(tile_rows: int) -> tuple[int, int]:
    """Returns rows and columns of a cluster for `tile_rows` rows of tiles: pairs of rows if their number is even."""
    if tile_rows == 1:
        return 1, 1
    return (2, 1) if tile_rows % 2 == 0 else (1, 2)
