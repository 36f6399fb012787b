"""Selects a variant of kernels/int4_wide.cu: how W is divided among blocks. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from runner_svc.cuda.int4.int4_variant import PITCH_PADDING, SHARED_BYTES
from runner_svc.cuda.int4.packed_matrix import STRIP_ROWS, TILE_ROWS

ADDS = "EPILOGUE_RESIDUAL"
_TILE_STRIPS = TILE_ROWS // STRIP_ROWS
_STRIPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14)  # for which wgmma has a width
_ENOUGH_STRIPS = 8
_MOST_STRIPS_OF_FOUR = 12
_FEWEST_STEPS = 8
_PLANE_BYTES = 128
_STAGES = ((4, 4), (3, 3), (2, 3))
"""Of numbers and of codes, from the most on."""
_ENOUGH_INPUT_STAGES, _MOST_INPUT_STAGES = 4, 6


@dataclass(frozen=True, slots=True)
class WideVariant:
    """Products of `tokens` rows of x at a time by blocks of `strips` times 16 rows of W.

    `split` blocks have parts of the columns.
    """

    tokens: int
    strips: int
    """Where gated, half of them are gate's."""
    split: int
    converters: int
    tile_bytes: int
    gated: bool

    inputs: ClassVar[str] = "128s"
    """How x is given, as in `Kernel`: a map."""
    kernel: ClassVar[str] = "int4_wide"
    planes: ClassVar[int] = 1
    """Planes of x that are copied at once."""

    @classmethod
    def choose(
        cls, multiprocessors: int, num_tokens: int, tiles: int, steps: int, tile_bytes: int, epilogue: str
    ) -> WideVariant:
        """Returns the variant for x of `num_tokens` rows and W of `tiles` by `steps` tiles."""
        tokens, gated, adds = 64 if num_tokens <= 64 else 128, epilogue == "EPILOGUE_GATED", epilogue == ADDS
        units, strips, split = tiles * _TILE_STRIPS // (1 + gated), 1, 1
        for split in (1, 2):
            own = -(-units * split // multiprocessors) * (1 + gated)
            strips = next((one for one in _STRIPS if one >= own and one % (1 + gated) == 0), _STRIPS[-1])
            if strips >= _ENOUGH_STRIPS or 2 * split * _FEWEST_STEPS > steps:
                break
        if adds:  # the sums of squares are those of 8, 16 or 32 adjacent lanes
            strips = max(2, 1 << (min(strips, 8) - 1).bit_length())
        elif not gated and split == 2 and strips < _ENOUGH_STRIPS and steps >= 4 * _FEWEST_STEPS:
            own = -(-units * 4 // (multiprocessors * 7 // 8))  # 32 clusters of four take two turns on an H200
            if own <= _MOST_STRIPS_OF_FOUR:
                strips, split = next(one for one in _STRIPS if one >= own), 4
        # With four warpgroups, the assembler accepts no instruction of more than 128 registers.
        converters = 3 if tokens == 128 and strips > _MOST_STRIPS_OF_FOUR else 7
        return cls(tokens, strips, split, converters, tile_bytes, gated)

    @property
    def outputs(self) -> int:
        """Outputs of a block for each row of x."""
        return self.strips * STRIP_ROWS // (1 + self.gated)

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, those that convert, and a warp that copies."""
        return 2 * self.tokens + self.converters * 32 + 32

    @property
    def _stages(self) -> tuple[int, int, int]:
        """Stages of x, of numbers and of codes."""
        numbers, codes = self.strips * STRIP_ROWS * _PLANE_BYTES, self.strips * self.tile_bytes // _TILE_STRIPS
        found = (0, 0, 0)
        for stages in _STAGES:
            left = SHARED_BYTES - stages[0] * numbers - stages[1] * codes - self.tokens * 4 - 16 * 16
            found = (min(_MOST_INPUT_STAGES, left // (self.tokens * _PLANE_BYTES)), *stages)
            if found[0] >= _ENOUGH_INPUT_STAGES:
                break
        return found

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block."""
        inputs, numbers, codes = self._stages
        rings = inputs * self.tokens * _PLANE_BYTES + numbers * self.strips * STRIP_ROWS * _PLANE_BYTES
        rings += codes * self.strips * self.tile_bytes // _TILE_STRIPS
        return rings + self.tokens * 4 + (inputs + numbers + codes) * 16

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sums that take the place of the rings."""
        return self.tokens * (self.strips * STRIP_ROWS + PITCH_PADDING) * 4

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""
        inputs, numbers, codes = self._stages
        return {
            "TOKENS": self.tokens,
            "TILE_ROWS": self.strips * STRIP_ROWS,
            "STRIPS": self.strips,
            "PARTS": 1,
            "SPLIT": self.split,
            "CONVERTERS": self.converters,
            "INPUT_STAGES": inputs,
            "NUMBER_STAGES": numbers,
            "CODE_STAGES": codes,
        }

    def grid(self, tiles: int, multiprocessors: int, num_tokens: int) -> int:
        """Returns the number of blocks for W of `tiles` rows of tiles."""
        return -(-tiles * _TILE_STRIPS // self.strips) * self.split * -(-num_tokens // self.tokens)
