"""Selects a variant of kernels/int4_wide.cu: how W is divided among blocks. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from runner_svc.cuda.int4.int4_variant import PITCH_PADDING, SHARED_BYTES
from runner_svc.cuda.int4.packed_matrix import STRIP_ROWS, TILE_ROWS

_FEW_ROWS, _MANY_ROWS = (64, 128), 256
_TILE_STRIPS = TILE_ROWS // STRIP_ROWS
_PLANE_BYTES = 128
_SLICE = 64
_MOST_SPLITS = 8
_FEWEST_STEPS = 4
"""Of a part of the columns."""
_FEWEST_SHARED_STEPS = 8
"""Of a block."""
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
    shares: bool = False
    """Whether each multiprocessor has the same number of steps, of several tiles; `split` is 1."""

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
        return cls(tokens, division.groups, division.split, tile_bytes, epilogue == "EPILOGUE_GATED", division.shares)

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
        room = SHARED_BYTES - self.tokens * 4 - 64 * 16 - self._slice_bytes
        both = room // (2 * plane + codes)
        of_codes = min(room - 2 * both * plane, (both + 1) * codes) // codes
        return (room - of_codes * codes) // plane, of_codes

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block."""
        inputs, codes = self._stages
        rings = inputs * self.tokens * _PLANE_BYTES + codes * self.groups * self.tile_bytes
        return rings + self._slice_bytes + self.tokens * 4 + (inputs + codes) * 16

    @property
    def _slice_bytes(self) -> int:
        """Bytes of the sums that are ended at once, where they do not take the place of the rings."""
        return _SLICE * (self.groups * TILE_ROWS + PITCH_PADDING) * 4 if self.shares else 0

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
            "SHARES": int(self.shares),
            **({"SLICE": _SLICE} if self.shares else {}),
            "CHUNK": self.chunk,
            "INPUT_STAGES": inputs,
            "CODE_STAGES": codes,
        }

    def grid(self, tiles: int, multiprocessors: int, num_tokens: int) -> int:
        """Returns the number of blocks for W of `tiles` rows of tiles."""
        if self.shares:
            return multiprocessors
        return -(-tiles // self.groups) * self.split * -(-num_tokens // self.tokens)


class _Division(NamedTuple):
    """The number of warpgroups of a block and of parts of the columns, with the cycles that it is expected to take."""

    cycles: int
    split: int
    groups: int
    shares: bool


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
        found = [self._division(tokens, passes, groups, split) for groups in _GROUPS[tokens] for split in splits]
        if self.tiles * passes * self.steps >= _FEWEST_SHARED_STEPS * self.multiprocessors:
            found += [self._shares(tokens, passes, groups) for groups in _GROUPS[tokens]]
        return min(found)

    def _cycles_of_a_step(self, tokens: int, groups: int) -> int:
        copied = (2 * tokens * _PLANE_BYTES + groups * self.tile_bytes) // _BYTES_A_CYCLE
        return max(4 * groups * tokens, copied)

    def _shares(self, tokens: int, passes: int, groups: int) -> _Division:
        tiles = -(-self.tiles // groups) * passes
        share = -(-tiles * self.steps // self.multiprocessors)
        added = -(-self.steps // share)  # most blocks whose sums another adds
        kept = _CYCLES_OF_A_MEETING + 8 * groups * TILE_ROWS * tokens // _BYTES_A_CYCLE
        cycles = share * self._cycles_of_a_step(tokens, groups) + _CYCLES_OF_A_BLOCK + added * kept
        return _Division(cycles, 1, groups, True)

    def _division(self, tokens: int, passes: int, groups: int, split: int) -> _Division:
        rounds = -(-(-(-self.tiles // groups) * split * passes) // self.multiprocessors)
        cycles = -(-self.steps // split) * self._cycles_of_a_step(tokens, groups) + _CYCLES_OF_A_BLOCK
        if split > 1:
            cycles += _CYCLES_OF_A_MEETING + 8 * groups * TILE_ROWS * tokens // _BYTES_A_CYCLE
        return _Division(rounds * cycles, split, groups, False)
