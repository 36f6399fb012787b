"""Selects a variant of kernels/int4_stream.cu: how W is divided among blocks and warps. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from runner_svc.cuda.int4.int4_variant import SHARED_BYTES
from runner_svc.cuda.int4.packed_matrix import STRIP_ROWS, TILE_ROWS

MOST_ROWS = 8
"""Rows of x."""
_WARPS = 8
_TILE_STRIPS = TILE_ROWS // STRIP_ROWS
_MOST_STRIPS = 3
_MOST_SLOTS = 3
_FEWEST_STAGES, _MOST_STAGES = 3, 16
_BYTES_OF_X = 256  # of a row and a step
_BYTES_OF_SUMS = STRIP_ROWS * MOST_ROWS * 4


@dataclass(frozen=True, slots=True)
class StreamVariant:
    """Products of up to `rows` rows by warps that have columns of their own, the same for all rows of W.

    A block has up to `units` units of `strips` times 16 rows of W. The warps are those of any matrix, so that the order
    of additions depends on the matrix alone.
    """

    rows: int  # 1 or 8
    strips: int
    units: int
    resident_steps: int
    """Most tiles of a warp's columns, if x stays in shared memory. 0: x passes through the ring; `units` is 1."""
    blocks: int  # of a multiprocessor
    tile_bytes: int
    gated: bool
    steps: int
    """Most tiles of a warp's columns."""

    inputs: ClassVar[str] = "Pii"
    """How x is given, as in `Kernel`: its address, elements from row to row, and columns."""
    kernel: ClassVar[str] = "int4_stream"

    @classmethod
    def choose(
        cls, blocks: int, multiprocessors: int, num_tokens: int, tiles: int, steps: int, tile_bytes: int, epilogue: str
    ) -> StreamVariant:
        """Returns the variant for x of up to 8 rows and W of `tiles` by `steps` tiles.

        `blocks`: of a multiprocessor, of which a product has one. With two, the next product's begins beside it, if
        shared memory has enough stages for both.
        """
        gated = epilogue == "EPILOGUE_GATED"
        strips, own = tiles * _TILE_STRIPS // (1 + gated), -(-steps // _WARPS)
        adjacent = 1 if gated else min(_MOST_STRIPS, -(-strips // multiprocessors))
        if epilogue == "EPILOGUE_RESIDUAL":
            adjacent = max(2, adjacent)  # sums of squares are those of 32 columns or more
        rows = 1 if num_tokens == 1 else MOST_ROWS
        units = -(-strips // (adjacent * multiprocessors))
        sizes = (blocks, tile_bytes, gated, own)
        found = cls(rows, adjacent * (1 + gated), units, own if units > 1 else 0, *sizes)
        if found.fits:
            return found
        if blocks > 1:
            return cls.choose(1, multiprocessors, num_tokens, tiles, steps, tile_bytes, epilogue)
        return cls(rows, found.strips, 1, 0, *sizes)  # more blocks, one after another

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
        """Threads of a block: the warps that multiply and one that reads the scales of rows."""
        return (_WARPS + 1) * 32

    @property
    def _slots(self) -> int:
        return min(self.units, _MOST_SLOTS)

    @property
    def _stage_bytes(self) -> int:
        of_x = 0 if self.resident_steps else self.rows * _BYTES_OF_X
        return _WARPS * (self.strips * self.tile_bytes // _TILE_STRIPS + of_x)

    @property
    def _fixed_bytes(self) -> int:
        """Bytes of resident x, sums, scales, counts and barriers."""
        resident = _WARPS * self.resident_steps * self.rows * _BYTES_OF_X
        sums = self._slots * _WARPS * self.strips * _BYTES_OF_SUMS
        return resident + sums + MOST_ROWS * 4 + (self.units + 1) // 2 * 8 + self._slots * 8

    @property
    def stages(self) -> int:
        """Stages of a warp's ring, as many as fit and are of use."""
        fitting = (SHARED_BYTES // self.blocks - self._fixed_bytes) // self._stage_bytes
        return min(_MOST_STAGES, max(_FEWEST_STAGES, self.units * self.steps + 1), fitting)

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
            "ROWS": self.rows,
            "RESIDENT_STEPS": self.resident_steps,
            "SLOTS": self._slots,
            "BLOCKS": self.blocks,
        }

    def grid(self, tiles: int, multiprocessors: int, num_tokens: int) -> int:
        """Returns the number of blocks for W of `tiles` rows of tiles."""
        halves = 1 + self.gated
        units = -(-tiles * _TILE_STRIPS // self.strips) if not self.gated else tiles * _TILE_STRIPS // halves
        return -(-units // self.units)
