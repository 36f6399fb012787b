"""Matrices in GGUF's blocks, as `runner_svc.gguf.conversion` writes them: NAME.blocks, the bytes of each row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.quantization.stored_format import ExpectedTensor, StoredTensors
from runner_svc.weights.matrix_part import ALL, Region, counted

if TYPE_CHECKING:
    from runner_svc.weights.matrix import Matrix

BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Columns and bytes of a block of each type."""


@dataclass(frozen=True, slots=True)
class StoredGguf:
    """Blocks of a type of `BLOCKS`."""

    kind: str

    @property
    def name(self) -> str:
        """For logs and refusals."""
        return f"GGUF {self.kind}"

    @property
    def unit(self) -> int:
        """See `StoredFormat`."""
        return BLOCKS[self.kind][0]

    def tensors(self, module: str, rows: int, columns: int) -> Iterator[ExpectedTensor]:
        """Yields the tensor of the matrix [rows, columns] of a module."""
        elements, size = BLOCKS[self.kind]
        if columns % elements:
            raise UnsupportedModel(
                f"{module} has {columns} columns, not a multiple of {elements}, and can't be {self.name}."
            )
        yield ExpectedTensor(f"{module}.blocks", ((rows, columns // elements * size),), ("U8",))

    def units(self, rows: int, columns: int) -> tuple[int, int]:
        """See `StoredFormat`."""
        return 1, self.unit

    def read(self, module: str, rows: int, columns: int, stored: StoredTensors, region: Region = ALL) -> Matrix:
        """Returns a region of the matrix of a module."""
        from runner_svc.weights.blocks.gguf_matrix import read_blocks

        elements, size = BLOCKS[self.kind]
        blocks = counted(region.columns, elements)
        places = slice(blocks.start * size, blocks.stop * size) if blocks is not None else None
        return read_blocks(stored.part(f"{module}.blocks", region.rows, places), self.kind)
