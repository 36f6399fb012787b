"""Matrices in GGUF's blocks, as they lie in a file."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runner_svc.weights.blocks.gguf_types import BLOCK_TYPES, BlockType
from runner_svc.weights.blocks.grouped import Grouped, GroupedMatrix
from runner_svc.weights.blocks.int8_matrix import Int8Matrix
from runner_svc.weights.int4_matrix import Int4Matrix
from runner_svc.weights.int4_packing import pack_pairs
from runner_svc.weights.matrix import Cuts, Matrix, extended

_SIMPLE = 32
"""Columns of a block of Q4_0 and Q8_0, which have one float16 scale before their codes."""


@dataclass(frozen=True, slots=True, eq=False)
class GgufMatrix(GroupedMatrix):
    """Each row is whole blocks."""

    blocks: Tensor  # uint8 [out, in / elements * bytes of a block]
    kind: str
    """A name of `BLOCK_TYPES`."""

    @property
    def type(self) -> BlockType:
        """Of its blocks."""
        return BLOCK_TYPES[self.kind]

    @property
    def format(self) -> str:
        return f"GGUF {self.kind}"

    @property
    def size(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.blocks.shape[1] // self.type.num_bytes * self.type.elements

    @property
    def num_bytes(self) -> int:
        return self.blocks.numel()

    @property
    def cuts(self) -> Cuts:
        """Columns at blocks."""
        return Cuts(1, self.type.elements)

    def cut(self, rows: slice, columns: slice) -> GgufMatrix:
        self.cuts.check(self.size, rows, columns)
        first, last = (place // self.type.elements * self.type.num_bytes for place in (columns.start, columns.stop))
        return replace(self, blocks=self.blocks[rows, first:last])

    def with_zeros(self, rows: int, columns: int) -> GgufMatrix | None:
        """A block whose bytes are zeros is zeros, as its scales are."""
        if columns % self.type.elements:
            return None
        return replace(self, blocks=extended(self.blocks, rows, columns // self.type.elements * self.type.num_bytes))

    def reordered(self, order: Tensor) -> GgufMatrix:
        return replace(self, blocks=self.blocks[order.to(self.blocks.device)])

    def beneath(self, others: list[Matrix]) -> GgufMatrix | None:
        like = [other for other in others if isinstance(other, GgufMatrix) and other.kind == self.kind]
        if len(like) < len(others):
            return None
        return replace(self, blocks=torch.cat([self.blocks, *(other.blocks for other in like)]))

    def grouped(self) -> Grouped:
        rows, columns = self.size
        flat = self.type.unpack(self.blocks.reshape(-1, self.type.num_bytes))
        return replace(
            flat,
            codes=flat.codes.view(rows, columns),
            scales=flat.scales.view(rows, -1),
            offsets=flat.offsets.view(rows, -1) if flat.offsets is not None else None,
        )


def read_blocks(blocks: Tensor, kind: str) -> Matrix:
    """Returns the matrix of the rows' bytes, uint8 [out, bytes]; `kind` is Q4_0, Q8_0 or a name of `BLOCK_TYPES`.

    Q4_0 and Q8_0 are moved into the layout that products of the same integers have already; no number changes.
    """
    if kind not in ("Q4_0", "Q8_0"):
        return GgufMatrix(blocks, kind)
    per_block = blocks.unflatten(1, (-1, 2 + (_SIMPLE if kind == "Q8_0" else _SIMPLE // 2)))
    scales = per_block[..., :2].contiguous().view(torch.float16).squeeze(-1)
    codes = per_block[..., 2:]
    if kind == "Q8_0":
        return Int8Matrix(codes.contiguous().view(torch.int8).flatten(1), scales, _SIMPLE)
    halves = torch.cat((codes & 15, codes >> 4), dim=-1).flatten(1)
    return Int4Matrix(pack_pairs(halves), scales, None, _SIMPLE, halves.shape[1])
