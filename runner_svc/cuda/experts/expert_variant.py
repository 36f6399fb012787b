"""Which variant of kernels/expert_product.cu a product gets. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 64
"""Rows of an expert's matrix in a tile."""
STEP = 64
"""Columns of it in a stage; the widths of all matrices are multiples of it."""
BOX_ROWS = 8
"""Rows of x that are copied at once."""
THREADS = 160
"""A warpgroup that multiplies and a warp that copies."""
JOB_ROWS = (8, 16, 32, 64, 128)
"""What the most rows of a job can be."""

# Of a multiprocessor: what its blocks can have together, less what the driver keeps of each.
_SHARED_BYTES = 224 * 1024
_MAX_STAGES = 24


@dataclass(frozen=True, slots=True)
class ExpertVariant:
    """Jobs of up to `job_rows` rows, `blocks` blocks a multiprocessor."""

    job_rows: int
    blocks: int

    @property
    def _stage_bytes(self) -> int:
        return (TILE_ROWS + self.job_rows) * 2 * STEP

    @property
    def _sum_bytes(self) -> int:
        return 4 * self.job_rows * (TILE_ROWS + 4)

    @property
    def stages(self) -> int:
        """As many as fit, with two barriers of 8 bytes for each."""
        return min(_MAX_STAGES, (_SHARED_BYTES // self.blocks - self._sum_bytes) // (self._stage_bytes + 16))

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return self.stages * (self._stage_bytes + 16) + self._sum_bytes

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""
        return {"TOKENS": self.job_rows, "STAGES": self.stages}


def num_tiles(outputs: int, gated: bool) -> int:
    """Tiles of an expert's matrix; a gated one has a gate's and an up's row for each output."""
    return -(-outputs // (TILE_ROWS // 2 if gated else TILE_ROWS))
