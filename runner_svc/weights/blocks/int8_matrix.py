"""Matrices of 8-bit integers: W[o, i] = codes[o, i] * scales[o, g], g the group of column i; GGUF's Q8_0."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runner_svc.weights.blocks.grouped import Grouped, GroupedMatrix
from runner_svc.weights.matrix import Cuts, Matrix, extended


@dataclass(frozen=True, slots=True, eq=False)
class Int8Matrix(GroupedMatrix):
    """Groups have `group` adjacent columns, which divides their number."""

    codes: Tensor  # int8 [out, in]
    scales: Tensor  # float16, bfloat16 or float32 [out, in / group]
    group: int

    @property
    def format(self) -> str:
        return f"int8 in groups of {self.group}"

    @property
    def size(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + self.scales.numel() * self.scales.element_size()

    @property
    def cuts(self) -> Cuts:
        """Columns at groups."""
        return Cuts(1, self.group)

    def cut(self, rows: slice, columns: slice) -> Int8Matrix:
        self.cuts.check(self.size, rows, columns)
        groups = slice(columns.start // self.group, columns.stop // self.group)
        return replace(self, codes=self.codes[rows, columns], scales=self.scales[rows, groups])

    def with_zeros(self, rows: int, columns: int) -> Int8Matrix | None:
        if columns % self.group:
            return None
        return replace(
            self,
            codes=extended(self.codes, rows, columns),
            scales=extended(self.scales, rows, columns // self.group),
        )

    def reordered(self, order: Tensor) -> Int8Matrix:
        order = order.to(self.codes.device)
        return replace(self, codes=self.codes[order], scales=self.scales[order])

    def beneath(self, others: list[Matrix]) -> Int8Matrix | None:
        like = [other for other in others if isinstance(other, Int8Matrix) and self._is_like(other)]
        if len(like) < len(others):
            return None
        parts = [self, *like]
        return replace(
            self, codes=torch.cat([part.codes for part in parts]), scales=torch.cat([part.scales for part in parts])
        )

    def _is_like(self, other: Int8Matrix) -> bool:
        return (self.group, self.scales.dtype) == (other.group, other.scales.dtype)

    def grouped(self) -> Grouped:
        return Grouped(self.codes.contiguous().view(torch.uint8) ^ 128, 8, 128, self.scales.float())

    def dequantized(self) -> Tensor:
        """Returns what `grouped` says, in fewer passes."""
        numbers = self.codes.float().unflatten(1, (-1, self.group))
        return numbers.mul_(self.scales.float().unsqueeze(-1)).flatten(1)
