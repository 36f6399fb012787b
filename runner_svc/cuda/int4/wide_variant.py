"""Selects a variant of kernels/int4_wide.cu: how W is divided among blocks. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from runner_svc.cuda.int4.int4_variant import PITCH_PADDING, SHARED_BYTES
from runner_svc.cuda.int4.packed_matrix import STRIP_ROWS, TILE_ROWS

_FEW_ROWS, _MANY_ROWS = (64, 128), 256
_TILE_STRIPS = TILE_ROWS // STRIP_ROWS
_PLANE_BYTES = 128
_MOST_SPLITS = 8
_FEWEST_STEPS = 4
"""Of a part of the columns."""
_GROUPS = {64: (1, 2, 3, 4), 128: (1, 2), 256: (1, 2)}
"""Warpgroups of a block by its rows of x: for what registers suffice. Three of 128 rows were slower on an H200."""
_MOVING_ROWS = 256
"""Rows of x of blocks of two warpgroups that take registers from a third one."""
# Cycles of one multiprocessor, measured and rounded: a block's start and end; a wait for the others of a tile.
_CYCLES_OF_A_BLOCK, _CYCLES_OF_A_MEETING = 3000, 2000
_BYTES_A_CYCLE = 36


@dataclass(frozen=True, slots=True)
class WideVariant:
    """Products of `tokens` rows of x at a time by blocks of `groups` warpgroups, each of which has 64 rows of W.

    `split` blocks have parts of the columns.
    """

    tokens: int
    groups: int
    """Where gated, half of a block's rows of W are gate's."""
    split: int
    tile_bytes: int
    gated: bool
    sharers: int = 1
    """Blocks of a cluster with the same rows of x, which they copy for each other: 1 or 2."""

    inputs: ClassVar[str] = "128s"
    """How x is given, as in `Kernel`: a map."""
    kernel: ClassVar[str] = "int4_wide"
    planes: ClassVar[int] = 1
    """Planes of x that are copied at once."""

    @classmethod
    def choose(
        cls, multiprocessors: int, num_tokens: int, tiles: int, steps: int, tile_bytes: int, epilogue: str
    ) -> WideVariant:
        """Returns the variant for x of `num_tokens` rows and W of `tiles` by `steps` tiles.

        W is divided in the same way for up to 64 rows, for up to 128 and beyond: so long, a row's bits are the same.
        """
        matrix = _Matrix(multiprocessors, tiles, steps, tile_bytes)
        nominal = next((rows for rows in _FEW_ROWS if rows >= num_tokens), _MANY_ROWS)
        forms = (nominal,) if nominal < _MANY_ROWS else (128, _MANY_ROWS)
        most = min(forms, key=lambda tokens: matrix.divided(tokens, nominal).cycles)
        division, passes = matrix.divided(most, nominal), -(-num_tokens // most)
        tokens = -(-num_tokens // (passes * 64)) * 64
        return cls(tokens, division.groups, division.split, tile_bytes, epilogue == "EPILOGUE_GATED")

    @property
    def outputs(self) -> int:
        """Outputs of a row of x whose squares are added up at once, where not gated."""
        return next(size for size in (128, 64) if self.groups * TILE_ROWS % size == 0)

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, a warp that copies and one that reads the scales of rows."""
        return self.groups * 128 + (128 if self.tokens >= _MOVING_ROWS and self.groups == 2 else 64)

    @property
    def chunk(self) -> int:
        """Columns whose numbers a thread has at a time."""
        return 64 if self.tokens == 64 or self.groups == 2 else 32

    @property
    def _stages(self) -> tuple[int, int]:
        """Stages of x and of codes."""
        plane, codes = self.tokens * _PLANE_BYTES, self.groups * self.tile_bytes
        room = SHARED_BYTES - self.tokens * 4 - 64 * 16
        both = room // (2 * plane + codes)
        return 2 * both, min(room - 2 * both * plane, (both + 1) * codes) // codes

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block."""
        inputs, codes = self._stages
        rings = inputs * self.tokens * _PLANE_BYTES + codes * self.groups * self.tile_bytes
        return rings + self.tokens * 4 + (inputs + codes) * 16

    @property
    def sum_bytes(self) -> int:
        """Bytes of a block's sums, in place of the rings or in memory."""
        return self.tokens * (self.groups * TILE_ROWS + PITCH_PADDING) * 4

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""
        inputs, codes = self._stages
        return {
            "TOKENS": self.tokens,
            "TILE_ROWS": self.groups * TILE_ROWS,
            "STRIPS": self.groups * _TILE_STRIPS,
            "PARTS": 1,
            "PARTS_IN_MEMORY": 1,
            "SPLIT": self.split,
            "SHARERS": self.sharers,
            "CHUNK": self.chunk,
            "INPUT_STAGES": inputs,
            "CODE_STAGES": codes,
        }

    def grid(self, tiles: int, multiprocessors: int, num_tokens: int) -> int:
        """Returns the number of blocks for W of `tiles` rows of tiles."""
        tiles = -(-tiles // (self.groups * self.sharers)) * self.sharers
        return tiles * self.split * -(-num_tokens // self.tokens)

    @property
    def copied_rows(self) -> int:
        """Rows of x that are copied at once."""
        return self.tokens // self.sharers


class _Division(NamedTuple):
    """The number of warpgroups of a block and of parts of the columns, with the cycles that it is expected to take."""

    cycles: int
    split: int
    groups: int


@dataclass(frozen=True, slots=True)
class _Matrix:
    """W of `tiles` by `steps` tiles, on a GPU."""

    multiprocessors: int
    tiles: int
    steps: int
    tile_bytes: int

    def divided(self, tokens: int, num_tokens: int) -> _Division:
        """Returns the fastest division for `num_tokens` rows of x, `tokens` a block."""
        splits = [split for split in range(1, _MOST_SPLITS + 1) if split * _FEWEST_STEPS <= self.steps] or [1]
        passes = -(-num_tokens // tokens)
        return min(self._division(tokens, passes, groups, split) for groups in _GROUPS[tokens] for split in splits)

    def _division(self, tokens: int, passes: int, groups: int, split: int) -> _Division:
        rounds = -(-(-(-self.tiles // groups) * split * passes) // self.multiprocessors)
        copied = (2 * tokens * _PLANE_BYTES + groups * self.tile_bytes) // _BYTES_A_CYCLE
        cycles = -(-self.steps // split) * max(4 * groups * tokens, copied) + _CYCLES_OF_A_BLOCK
        if split > 1:
            cycles += _CYCLES_OF_A_MEETING + 8 * groups * TILE_ROWS * tokens // _BYTES_A_CYCLE
        return _Division(rounds * cycles, split, groups)
