"""Selects a variant of kernels/int4_stream.cu: how W is divided among blocks and warps. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from runner_svc.cuda.int4.int4_variant import SHARED_BYTES
from runner_svc.cuda.int4.packed_matrix import STEP, STRIP_ROWS, TILE_ROWS

MOST_ROWS = 8
"""Rows of x."""
_WARPS = 16
_TILE_STRIPS = TILE_ROWS // STRIP_ROWS
_MOST_STRIPS = 3
_MOST_SLOTS = 3
_FEWEST_STAGES, _MOST_STAGES = 2, 8
_BYTES_OF_X = MOST_ROWS * STEP * 2  # of a step
_BYTES_OF_SUMS = STRIP_ROWS * MOST_ROWS * 4


@dataclass(frozen=True, slots=True)
class StreamVariant:
    """Products of up to 8 rows by warps that have columns of their own, the same for all rows of W.

    A block has up to `units` units of `strips` times 16 rows of W. The warps are those of any matrix, so that the order
    of additions depends on the matrix alone.
    """

    strips: int
    units: int
    resident_steps: int
    """Most tiles of a warp's columns, if x stays in shared memory. 0: x passes through the ring; `units` is 1."""
    tile_bytes: int
    gated: bool
    steps: int
    """Most tiles of a warp's columns."""

    inputs: ClassVar[str] = "Pii"
    """How x is given, as in `Kernel`: its address, elements from row to row, and columns."""
    kernel: ClassVar[str] = "int4_stream"

    @classmethod
    def choose(cls, multiprocessors: int, tiles: int, steps: int, tile_bytes: int, epilogue: str) -> StreamVariant:
        """Returns the variant for W of `tiles` by `steps` tiles: a block for each multiprocessor, where that fits."""
        gated = epilogue == "EPILOGUE_GATED"
        strips, own = tiles * _TILE_STRIPS // (1 + gated), -(-steps // _WARPS)
        adjacent = 1 if gated else min(_MOST_STRIPS, -(-strips // multiprocessors))
        if epilogue == "EPILOGUE_RESIDUAL":
            adjacent = max(2, adjacent)  # sums of squares are those of 32 columns or more
        units = -(-strips // (adjacent * multiprocessors))
        found = cls(adjacent * (1 + gated), units, own if units > 1 else 0, tile_bytes, gated, own)
        if found.fits or units == 1:
            return found
        return cls(found.strips, 1, 0, tile_bytes, gated, own)  # more blocks, one after another

    @property
    def fits(self) -> bool:
        """Whether shared memory has enough stages."""
        return self.stages >= _FEWEST_STAGES

    @property
    def outputs(self) -> int:
        """Outputs of a unit for each row of x, where not gated."""
        return self.strips * STRIP_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: the warps that multiply and one that ends units."""
        return (_WARPS + 1) * 32

    @property
    def _slots(self) -> int:
        return min(self.units, _MOST_SLOTS)

    @property
    def _stage_bytes(self) -> int:
        of_x = 0 if self.resident_steps else _BYTES_OF_X
        return _WARPS * (self.strips * self.tile_bytes // _TILE_STRIPS + of_x)

    @property
    def _fixed_bytes(self) -> int:
        """Bytes of resident x, sums, scales and barriers."""
        resident = _WARPS * self.resident_steps * _BYTES_OF_X
        sums = self._slots * _WARPS * self.strips * _BYTES_OF_SUMS
        return resident + sums + MOST_ROWS * 4 + self._slots * 16

    @property
    def stages(self) -> int:
        """Stages of a warp's ring, as many as fit and are of use."""
        fitting = (SHARED_BYTES - self._fixed_bytes) // self._stage_bytes
        return min(_MOST_STAGES, max(_FEWEST_STAGES, self.units * self.steps), fitting)

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block."""
        return self.stages * self._stage_bytes + self._fixed_bytes

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""
        return {
            "STRIPS": self.strips,
            "UNITS": self.units,
            "WARPS": _WARPS,
            "STAGES": self.stages,
            "RESIDENT_STEPS": self.resident_steps,
            "SLOTS": self._slots,
        }

    def grid(self, tiles: int, multiprocessors: int, num_tokens: int) -> int:
        """Returns the number of blocks for W of `tiles` rows of tiles."""
        units = -(-tiles * _TILE_STRIPS // self.strips)
        return -(-units // self.units)
