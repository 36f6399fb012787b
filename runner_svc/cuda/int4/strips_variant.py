"""Selects a variant of kernels/int4_strips.cu: how W is divided among blocks and warps. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from runner_svc.cuda.int4.int4_variant import MAX_STAGES, PITCH_PADDING, SHARED_BYTES, total_parts

STRIP_ROWS = 16
MOST_TOKENS = 32
_TOKENS = (8, 16, MOST_TOKENS)
_TILE_STRIPS = 4
_MOST_STRIPS = 16
_MOST_WARPS = 16
# With so many steps in the ring, a warp waits for memory only if all of them do.
_ENOUGH_STAGES = 3
_REGISTERS_OF_A_THREAD = {8: 56, 16: 64, MOST_TOKENS: 104}
_REGISTERS = 65536


@dataclass(frozen=True, slots=True)
class StripsVariant:
    """Products of up to `tokens` rows by blocks of `strips` times 16 rows of W, with `at_once` warps for each strip.

    Each of them multiplies one of `parts` of the columns at a time.
    """

    tokens: int
    strips: int
    """Where gated, half of them are gate's."""
    parts: int
    at_once: int
    tile_bytes: int
    gated: bool

    kernel: ClassVar[str] = "int4_strips"
    planes: ClassVar[int] = 2
    """Planes of x that are copied at once."""

    @classmethod
    def choose(
        cls, multiprocessors: int, num_tokens: int, tiles: int, steps: int, tile_bytes: int, epilogue: str
    ) -> StripsVariant | None:
        """Returns the variant for x of `num_tokens` rows and W of `tiles` by `steps` tiles: a block a multiprocessor.

        None for too many rows.
        """
        if num_tokens > MOST_TOKENS:
            return None
        tokens = next(tokens for tokens in _TOKENS if tokens >= num_tokens)
        gated, adds, parts = epilogue == "EPILOGUE_GATED", epilogue == "EPILOGUE_RESIDUAL", total_parts(tiles, steps)
        own = _own_strips(multiprocessors, tiles * _TILE_STRIPS // (1 + gated), _MOST_STRIPS // (1 + gated))
        if adds:  # the sums of squares are those of 4, 8 or 16 adjacent lanes, and there is room for 32 outputs each
            own = min(8, max(2, 1 << (own - 1).bit_length()))
        strips = own * (1 + gated)
        found = [
            cls(tokens, strips, parts, at_once, tile_bytes, gated)
            for at_once in (8, 4, 2, 1)
            if parts % at_once == 0 and strips * at_once <= max(strips, _MOST_WARPS)
        ]
        enough = [one for one in found if one.stages >= _ENOUGH_STAGES] or [one for one in found if one.stages >= 2]
        return enough[0] if enough else None

    @property
    def outputs(self) -> int:
        """Outputs of a block for each row of x."""
        return self.strips * STRIP_ROWS // (1 + self.gated)

    @property
    def threads(self) -> int:
        """Threads of a block: the warps, one that copies and one that reads the scales of rows."""
        return self.strips * self.at_once * 32 + 64

    @property
    def _stage_bytes(self) -> int:
        """Bytes of a stage, with two barriers."""
        return self.at_once * (self.strips * self.tile_bytes // _TILE_STRIPS + self.tokens * 256) + 16

    @property
    def _fixed_bytes(self) -> int:
        """Bytes of sums and scales."""
        pitch = self.strips * STRIP_ROWS + PITCH_PADDING
        return self.parts * self.tokens * pitch * 4 + self.tokens * 4

    @property
    def stages(self) -> int:
        """Stages of the ring, as many as fit into half of a multiprocessor's shared memory."""
        return min(MAX_STAGES, (SHARED_BYTES // 2 - self._fixed_bytes) // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block."""
        return self.stages * self._stage_bytes + self._fixed_bytes

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""
        return {
            "TOKENS": self.tokens,
            "TILE_ROWS": self.strips * STRIP_ROWS,
            "STRIPS": self.strips,
            "PARTS": self.parts,
            "SPLIT": 1,
            "AT_ONCE": self.at_once,
            "STAGES": self.stages,
            "BLOCKS": 2 if 2 * self.threads * _REGISTERS_OF_A_THREAD[self.tokens] <= _REGISTERS else 1,
        }

    def grid(self, tiles: int, multiprocessors: int, num_tokens: int) -> int:
        """Returns the number of blocks for W of `tiles` rows of tiles."""
        return -(-tiles * _TILE_STRIPS // self.strips)


def _own_strips(multiprocessors: int, strips: int, most: int) -> int:
    """Returns the strips of a block, such that all blocks have work in as few turns as possible."""
    turns = -(-strips // (multiprocessors * most))
    return -(-strips // (multiprocessors * turns))
