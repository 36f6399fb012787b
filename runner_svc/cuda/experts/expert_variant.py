"""Which kernel and variant of it the products of experts get. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

STEP = 64
"""Columns of an expert's matrix in a stage; the widths of all matrices are multiples of it."""
HALF_ROWS = (32, 24, 16)
"""Rows of gate in a tile of kernels/expert_product.cu."""
JOB_ROWS = (8, 16, 32, 64, 128)
"""Possible maximum numbers of rows of a job of kernels/expert_product.cu."""
TILE_JOB_ROWS = (32, 64, 160)
"""The same of kernels/expert_tiles.cu."""

_ROWS = 64  # of an expert's matrix that one instruction multiplies
_BARRIER_BYTES = 16
_WORK_BYTES = 16


class Variant(Protocol):
    """A kernel with its macros and the boxes of its copies."""

    @property
    def kernel(self) -> str:
        """Name of the source and of its function."""

    @property
    def job_rows(self) -> int:
        """Maximum number of rows of a job."""

    @property
    def gathers(self) -> bool:
        """Whether gated products read rows where they are."""

    @property
    def claims(self) -> bool:
        """Whether blocks claim tiles, so that jobs of many and of few rows may alternate."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def blocks(self) -> int:
        """Blocks per multiprocessor."""

    @property
    def box_rows(self) -> int:
        """Rows of x that are copied at once."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block uses."""

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""

    def __hash__(self) -> int:
        """Variants are keys of compiled kernels."""

    def outputs(self, gated: bool) -> int:
        """Returns the outputs of a tile."""

    def copied_rows(self, gated: bool) -> int:
        """Returns the rows of an expert's matrix that are copied at once."""

    def balanced(self, jobs: int, outputs: int, multiprocessors: int) -> Variant:
        """Returns the variant for gated products of a small number of jobs, `jobs`."""


@dataclass(frozen=True, slots=True)
class ExpertVariant:
    """kernels/expert_product.cu with jobs of up to `job_rows` rows and `blocks` blocks a multiprocessor.

    A tile has 64 rows of a matrix, or `half_rows` of gate and of up.
    """

    job_rows: int
    blocks: int
    half_rows: int = HALF_ROWS[0]

    kernel = "expert_product"
    gathers = False
    claims = False
    threads = 160
    """A warpgroup that multiplies and a warp that copies."""
    box_rows = 8

    # Of a multiprocessor: what its blocks can have together, less what the driver keeps of each.
    _SHARED_BYTES = 224 * 1024
    _MAX_STAGES = 24

    @property
    def _stage_bytes(self) -> int:
        return (_ROWS + self.job_rows) * 2 * STEP

    @property
    def _sum_bytes(self) -> int:
        return 4 * self.job_rows * (_ROWS + 4)

    @property
    def stages(self) -> int:
        """Stages of a block: as many as fit, with two barriers of 8 bytes for each."""
        left = self._SHARED_BYTES // self.blocks - self._sum_bytes
        return min(self._MAX_STAGES, left // (self._stage_bytes + _BARRIER_BYTES))

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block uses."""
        return self.stages * (self._stage_bytes + _BARRIER_BYTES) + self._sum_bytes

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""
        return {"TOKENS": self.job_rows, "STAGES": self.stages, "HALF_ROWS": self.half_rows}

    def outputs(self, gated: bool) -> int:
        """Returns the outputs of a tile."""
        return self.half_rows if gated else _ROWS

    def copied_rows(self, gated: bool) -> int:
        """Returns the rows of an expert's matrix that are copied at once."""
        return self.outputs(gated)

    def balanced(self, jobs: int, outputs: int, multiprocessors: int) -> ExpertVariant:
        """Returns the variant whose last multiprocessor ends soonest with the gated products of `jobs` jobs."""

        def cost(rows: int) -> int:
            return -(-jobs * num_tiles(outputs, rows) // multiprocessors) * rows

        return replace(self, half_rows=min(HALF_ROWS, key=cost))


@dataclass(frozen=True, slots=True)
class TilesVariant:
    """kernels/expert_tiles.cu with jobs of up to `job_rows` rows, which gated products may gather."""

    job_rows: int
    gathers: bool = False
    claims: bool = False
    """Whether blocks claim tiles, so that jobs of many and of few rows may alternate."""

    kernel = "expert_tiles"
    threads = 384
    """Two warpgroups that multiply and one that copies."""
    blocks = 1
    box_rows = 16

    _TILE_ROWS = 256
    _SHARED_BYTES = 227 * 1024

    @property
    def _stage_bytes(self) -> int:
        return (self._TILE_ROWS + self.job_rows) * 2 * STEP

    @property
    def stages(self) -> int:
        """Stages of a block: as many as fit."""
        return self._SHARED_BYTES // (self._stage_bytes + self._control_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block uses."""
        return self.stages * (self._stage_bytes + self._control_bytes)

    @property
    def _control_bytes(self) -> int:
        """Of a stage: barriers, and the work that begins there."""
        return _BARRIER_BYTES + (_WORK_BYTES if self.claims else 0)

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""
        return {"TOKENS": self.job_rows, "STAGES": self.stages, "CLAIMS": int(self.claims)}

    def outputs(self, gated: bool) -> int:
        """Returns the outputs of a tile."""
        return self._TILE_ROWS // (2 if gated else 1)

    def copied_rows(self, gated: bool) -> int:
        """Returns the rows of an expert's matrix that are copied at once."""
        return _ROWS

    def balanced(self, jobs: int, outputs: int, multiprocessors: int) -> TilesVariant:
        """Returns this variant: there is no other."""
        return self


def num_tiles(outputs: int, tile_outputs: int) -> int:
    """Returns the tiles of an expert's matrix."""
    return -(-outputs // tile_outputs)
