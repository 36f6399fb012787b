"""Selects a product's variant of kernels/split_product.cu: tiles and clusters. Plain arithmetic, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass

CONSUMER_ROWS = 64
"""Rows of x that a warpgroup multiplies."""
STEP = 64
"""Columns of x in a stage; the width of x is a multiple of it."""
VECTOR = 8
"""Outputs written at once; the number of outputs is a multiple of it."""
COLUMNS = {2: (64, 96, 128, 160, 192, 224, 256), 3: (96, 128, 160, 192)}
"""Outputs of a tile, by the warpgroups that multiply."""
SPLITS = (1, 2, 4)
"""Blocks that share a tile."""

_SHARED_BYTES = 227 * 1024
_BARRIER_BYTES = 16
# Of one output of a tile and a block that shares it, in rows and outputs of a step: sums are exchanged. Fitted to times
# of products of Qwen3-30B-A3B's shape and of Llama-3.1-8B's with 256 and 384 rows on an H200.
_EXCHANGE_COST = 16


@dataclass(frozen=True, slots=True)
class SplitVariant:
    """Tiles of `consumers` times 64 rows by `columns` outputs, each shared by `split` blocks."""

    columns: int
    split: int
    consumers: int = 2
    """Warpgroups of a block that multiply."""

    @classmethod
    def choose(cls, multiprocessors: int, num_rows: int, num_outputs: int, width: int) -> SplitVariant:
        """Returns the variant whose last block ends first; `width` is a multiple of a step."""
        variants = cls.fitting(num_rows, width)
        return min(variants, key=lambda variant: variant.cost(multiprocessors, num_rows, num_outputs, width))

    @classmethod
    def fitting(cls, num_rows: int, width: int) -> list[SplitVariant]:
        """Returns variants for `num_rows` rows; as many blocks share a tile with 129 to 256, and with 257 to 384."""
        splits = [split for split in SPLITS if width % (STEP * split) == 0]
        consumers = [3, 2] if num_rows > 4 * CONSUMER_ROWS else [2]
        return [cls(columns, split, each) for each in consumers for columns in COLUMNS[each] for split in splits]

    @property
    def rows(self) -> int:
        """Rows of x of a tile."""
        return self.consumers * CONSUMER_ROWS

    def steps(self, width: int) -> int:
        """Returns the steps of a block."""
        return width // (STEP * self.split)

    def row_tiles(self, num_rows: int) -> int:
        """Returns the tiles that have the same outputs."""
        return -(-num_rows // self.rows)

    def blocks(self, num_rows: int, num_outputs: int) -> int:
        """Returns the blocks of a product."""
        return self.row_tiles(num_rows) * -(-num_outputs // self.columns) * self.split

    def cost(self, multiprocessors: int, num_rows: int, num_outputs: int, width: int) -> int:
        """Returns the cost of a product: rows of x and outputs that the busiest multiprocessor reads in all steps, and
        what is exchanged."""
        rounds = -(-self.blocks(num_rows, num_outputs) // self._at_once(multiprocessors))
        exchanged = _EXCHANGE_COST * self.columns * self.split if self.split > 1 else 0
        return rounds * ((self.rows + self.columns) * self.steps(width) + exchanged)

    def _at_once(self, multiprocessors: int) -> int:
        """Returns the blocks that are sure to run at once: those of four are not in every part of the GPU."""
        clusters = multiprocessors // self.split
        return self.split * (clusters * 7 // 8 if self.split > 2 else clusters)

    @property
    def threads(self) -> int:
        """Threads of a block: the warpgroups that multiply and a warp that copies."""
        return 128 * self.consumers + 32

    @property
    def stages(self) -> int:
        """Stages of a block: as many as fit."""
        return _SHARED_BYTES // (self._stage_bytes + _BARRIER_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block uses."""
        return self.stages * (self._stage_bytes + _BARRIER_BYTES)

    @property
    def defines(self) -> dict[str, int | str]:
        """The source's macros."""
        return {"CONSUMERS": self.consumers, "COLUMNS": self.columns, "SPLIT": self.split, "STAGES": self.stages}

    @property
    def _stage_bytes(self) -> int:
        return (self.rows + self.columns) * 2 * STEP
