"""Selects a product's variant of kernels/canonical_product.cu: tiles, clusters, where parts are added.

Plain arithmetic. No choice changes a bit: docs/determinism.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runner_svc.cuda.products.gated_variant import CONSUMER_ROWS, STEP, TILES, GatedVariant, cluster_of

SQUARES_COLUMNS = 64
"""Columns of a tile of squares; those of a product's tile that adds to the residual stream are a multiple."""
_STORE_TILES = ((2, 64), (2, 96), (2, 128))
_RESIDUAL_TILES = ((2, 64), (2, 128))
# Cycles of an H200's multiprocessor: of a step of 64 columns, by warpgroups' outputs; overheads of a step and a tile.
_OUTPUT_CYCLES, _STEP_CYCLES, _TILE_CYCLES = 4, 32, 2560
# Bytes that it gets from L2 in a cycle while all others read too.
_L2_BYTES = 42
# Cycles to store and load the sums of a part, by a warpgroup's outputs.
_PART_CYCLES = 20


@dataclass(frozen=True, slots=True)
class ManyVariant:
    """A tile, and how many parts of the columns a block adds up itself (`parts`) or other tiles multiply (`split`)."""

    tile: GatedVariant
    parts: int = 1
    split: int = 1

    @classmethod
    def choose(cls, multiprocessors: int, ends: str, num_tokens: int, half: int, width: int, parts: int) -> ManyVariant:
        """Returns the variant whose last block ends first.

        `ends`: the source's macro; `half`: rows of the matrix's first half; `parts`: of the columns, `width`.
        """
        variants = cls.possible(multiprocessors, ends, num_tokens, half, width, parts)
        return min(variants, key=lambda variant: variant.cycles(multiprocessors, num_tokens, half, width))

    @classmethod
    def possible(
        cls, multiprocessors: int, ends: str, num_tokens: int, half: int, width: int, parts: int
    ) -> list[ManyVariant]:
        """Returns the variants of which `choose` chooses."""
        if ends == "ENDS_GATED":
            return [cls(GatedVariant.choose(multiprocessors, num_tokens, half, width), parts)]
        variants = []
        for consumers, columns in _RESIDUAL_TILES if ends == "ENDS_RESIDUAL" else _STORE_TILES:
            tile = GatedVariant(consumers, columns, *cluster_of(-(-num_tokens // (consumers * CONSUMER_ROWS))))
            variants.append(cls(tile, parts))
            rows, of_columns = tile.tiles(num_tokens, half)
            if parts > 1 and rows * of_columns * tile.cluster <= multiprocessors:
                variants.append(cls(replace(tile, head_start=0), 1, parts))
        return variants

    def cycles(self, multiprocessors: int, num_tokens: int, half: int, width: int) -> float:
        """Returns about how long a product takes: blocks process tiles in rounds."""
        tile = self.tile
        rows, columns = tile.tiles(num_tokens, half)
        rounds = -(-rows * columns * self.split // (multiprocessors // tile.cluster))
        outputs = tile.consumers * tile.columns
        read = (tile.rows // tile.cluster_columns + 2 * tile.columns // tile.cluster_rows) * 2 * STEP
        step = max(outputs * _OUTPUT_CYCLES + _STEP_CYCLES, read / _L2_BYTES)
        adding = outputs * _PART_CYCLES * (self.parts * self.split > 1)
        return rounds * (width / STEP / self.split * step + _TILE_CYCLES + adding)

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block: the tile's, two barriers, and a factor for each row."""
        return self.tile.shared_bytes + 16 + 4 * self.tile.rows

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""
        return self.tile.defines | {"PARTS": self.parts, "SPLIT": self.split}


def kept_floats(multiprocessors: int, tiles: Sequence[tuple[int, int]] = TILES) -> int:
    """Returns the most sums of a part that are in memory at a time: those of a tile for each multiprocessor."""
    return multiprocessors * max(consumers * CONSUMER_ROWS * 2 * columns for consumers, columns in tiles)
