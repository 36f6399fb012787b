"""Matrices in MXFP4 (OCP Microscaling Formats, version 1.0): e2m1 numbers, and a power of two for 32 columns each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runner_svc.weights.blocks.grouped import Grouped, GroupedMatrix
from runner_svc.weights.int4_packing import unpack_pairs
from runner_svc.weights.matrix import Cuts, Matrix, extended

GROUP = 32
"""Columns of a scale."""
NOT_A_NUMBER = 255
"""The scale that stands for NaN."""
_BIAS = 127
_MOST = 12
"""The largest number, 6, times two."""


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Matrix(GroupedMatrix):
    """W[o, i] = e2m1(code[o, i]) * 2 ** (scales[o, i // 32] - 127)."""

    codes: Tensor  # uint8 [out, in / 2]: an even column in the low four bits, the next one in the high ones
    scales: Tensor  # uint8 [out, in / 32]; readers refuse `NOT_A_NUMBER`

    @property
    def format(self) -> str:
        return "MXFP4"

    @property
    def size(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + self.scales.numel()

    @property
    def cuts(self) -> Cuts:
        """Columns at groups."""
        return Cuts(1, GROUP)

    def cut(self, rows: slice, columns: slice) -> Mxfp4Matrix:
        self.cuts.check(self.size, rows, columns)
        codes = self.codes[rows, columns.start // 2 : columns.stop // 2]
        return Mxfp4Matrix(codes, self.scales[rows, columns.start // GROUP : columns.stop // GROUP])

    def with_zeros(self, rows: int, columns: int) -> Mxfp4Matrix | None:
        if columns % GROUP:
            return None
        return Mxfp4Matrix(extended(self.codes, rows, columns // 2), extended(self.scales, rows, columns // GROUP))

    def reordered(self, order: Tensor) -> Mxfp4Matrix:
        order = order.to(self.codes.device)
        return Mxfp4Matrix(self.codes[order], self.scales[order])

    def beneath(self, others: list[Matrix]) -> Mxfp4Matrix | None:
        like = [other for other in others if isinstance(other, Mxfp4Matrix)]
        if len(like) < len(others):
            return None
        parts = [self, *like]
        return replace(
            self, codes=torch.cat([part.codes for part in parts]), scales=torch.cat([part.scales for part in parts])
        )

    def grouped(self) -> Grouped:
        """Returns the doubled numbers plus 12, which are integers from 0 to 24."""
        codes = _doubled(self.codes.device)[unpack_pairs(self.codes, self.size[1]).int()]
        exponents = self.scales.int() - (_BIAS + 1)
        halves = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
        return Grouped(codes, 5, _MOST, halves)


def _doubled(device: torch.device) -> Tensor:
    """Returns the numbers of the 16 codes times two, plus 12: uint8, made on the device, as a capture needs it.

    A code is a sign, two bits of exponent and one of fraction.
    """
    codes = torch.arange(16, device=device)
    exponent, fraction = (codes >> 1) & 3, codes & 1
    doubled = torch.where(exponent == 0, fraction, (2 + fraction) << (exponent - 1).clamp(min=0))
    return (_MOST + torch.where(codes < 8, doubled, -doubled)).to(torch.uint8)
