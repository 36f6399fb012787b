"""Matrices of 4-bit numbers: W[o, i] = (code[o, i] - zeros[o, g]) * scales[o, g], g the group of column i.

All layouts of checkpoints become this one when they are read (`int4_packing`), so that there is one product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runner_svc.weights.cpu_products import Nibbles, can_pack_int4, nibble_product
from runner_svc.weights.int4_packing import pack_pairs, unpack_pairs
from runner_svc.weights.matrix import Cuts, Matrix, Product, extended
from runner_svc.weights.matrix_part import common_unit

MIDDLE = 8
"""The zero of symmetric groups."""
LEAST_GROUP = 16
"""Smaller groups than multiples of this are not made."""


@dataclass(frozen=True, slots=True, eq=False)
class Int4Matrix(Matrix):
    """Groups have `group` adjacent columns; the last one may have fewer."""

    codes: Tensor  # uint8 [out, ceil(in / 2)]: an even column in the low four bits, the next one in the high ones
    scales: Tensor  # float16, bfloat16 or float32 [out, groups]
    zeros: Tensor | None  # uint8 [out, groups]; None: `MIDDLE`
    group: int
    columns: int
    order: Tensor | None = None
    """int64 [in]: column i is multiplied with x's column order[i]. None: with column i."""

    @property
    def format(self) -> str:
        kind = "symmetric" if self.zeros is None else "asymmetric"
        return f"int4 in {kind} groups of {self.group}" + (", columns reordered" if self.order is not None else "")

    @property
    def size(self) -> tuple[int, int]:
        return self.codes.shape[0], self.columns

    @property
    def num_bytes(self) -> int:
        zeros = self.zeros.numel() if self.zeros is not None else 0
        order = 4 * self.columns if self.order is not None else 0
        return self.codes.numel() + self.scales.numel() * self.scales.element_size() + zeros + order

    @property
    def cuts(self) -> Cuts:
        """Columns at groups of an even size; not at all where they are reordered."""
        can_cut = self.order is None and self.group % 2 == 0
        return Cuts(1, self.group if can_cut else max(self.columns, 1))

    def cut(self, rows: slice, columns: slice) -> Int4Matrix:
        self.cuts.check(self.size, rows, columns)
        groups = slice(columns.start // self.group, -(-columns.stop // self.group))
        return replace(
            self,
            codes=self.codes[rows, columns.start // 2 : -(-columns.stop // 2)],
            scales=self.scales[rows, groups],
            zeros=self.zeros[rows, groups] if self.zeros is not None else None,
            columns=columns.stop - columns.start,
        )

    def finer(self, rows: slice, columns: slice) -> Int4Matrix | None:
        """Returns it in groups at which the columns begin and end, which may be smaller ones with the same scales."""
        group = common_unit(self.group, columns, self.columns)
        if group == self.group and self.group % 2 == 0 and self.order is None:
            return self
        if self.order is not None:
            return Matrix.finer(self, rows, columns)
        return self._regrouped(group)

    def _regrouped(self, group: int) -> Int4Matrix | None:
        """Returns it in smaller groups with the same scales; None for groups that are too small."""
        if group == self.group:
            return self
        if group % LEAST_GROUP:
            return None
        count = -(-self.columns // group)

        def spread(of_groups: Tensor) -> Tensor:
            return of_groups.repeat_interleave(self.group // group, dim=1)[:, :count].contiguous()

        zeros = spread(self.zeros) if self.zeros is not None else None
        return replace(self, scales=spread(self.scales), zeros=zeros, group=group)

    def with_zeros(self, rows: int, columns: int) -> Int4Matrix | None:
        if columns == self.columns:
            return self._extended(rows, columns)
        if self.order is not None or self.columns % 2:
            return None
        # Scales of 0 make zeros of any code, so the columns that are added begin with a group.
        grouped = self._regrouped(math.gcd(self.group, self.columns))
        return grouped._extended(rows, columns) if grouped is not None else None

    def _extended(self, rows: int, columns: int) -> Int4Matrix:
        groups = -(-columns // self.group)
        return replace(
            self,
            codes=extended(self.codes, rows, -(-columns // 2)),
            scales=extended(self.scales, rows, groups),
            zeros=extended(self.zeros, rows, groups) if self.zeros is not None else None,
            columns=columns,
        )

    def reordered(self, order: Tensor) -> Int4Matrix:
        zeros = self.zeros[order] if self.zeros is not None else None
        return replace(self, codes=self.codes[order], scales=self.scales[order], zeros=zeros)

    def beneath(self, others: list[Matrix]) -> Int4Matrix | None:
        like = [other for other in others if isinstance(other, Int4Matrix) and self._is_like(other)]
        if len(like) < len(others):
            return None
        parts, zeros = [self, *like], None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat([part._all_zeros() for part in parts])
        codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
        return replace(self, codes=codes, scales=scales, zeros=zeros)

    def _is_like(self, other: Int4Matrix) -> bool:
        if (self.group, self.columns, self.scales.dtype) != (other.group, other.columns, other.scales.dtype):
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    def _all_zeros(self) -> Tensor:
        if self.zeros is not None:
            return self.zeros
        return torch.full_like(self.scales, MIDDLE, dtype=torch.uint8)

    def dequantized(self) -> Tensor:
        """Returns the columns in the order in which x has them."""
        codes = unpack_pairs(self.codes, self.columns).float()
        scales = self.scales.float().repeat_interleave(self.group, dim=1)[:, : self.columns]
        if self.zeros is None:
            weight = (codes - MIDDLE) * scales
        else:
            weight = (codes - self.zeros.float().repeat_interleave(self.group, dim=1)[:, : self.columns]) * scales
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def product(self, bias: Tensor | None, *, keep_plain: bool) -> Product:
        """Returns y = x W^T + b on the CPU; without `keep_plain` by torch's product with int4 weights if it has one."""
        if keep_plain or not can_pack_int4(self.codes.device, *self.size, self.group):
            return Matrix.product(self, bias, keep_plain=keep_plain)
        order, scales = self.order, self.scales.float()
        # torch's product computes (code - 8) * scale + offset.
        offsets = (MIDDLE - self._all_zeros().float()) * scales
        multiply = nibble_product([Nibbles(unpack_pairs(self.codes, self.columns), scales, offsets)], self.group, bias)
        return multiply if order is None else lambda x: multiply(x[:, order])


def to_int4(weight: Tensor, group: int) -> Int4Matrix:
    """Quantizes W [out, in] in symmetric groups by rounding to nearest. Nothing is calibrated: GPTQ and AWQ lose less.

    As in GGUF's Q4_0, the number of a group with the largest magnitude becomes -8 times the scale, which may be
    negative, so that all 16 codes are used. The scales are bfloat16.
    """
    columns = weight.shape[1]
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % group)).unflatten(1, (-1, group))
    largest = padded.gather(-1, padded.abs().argmax(dim=-1, keepdim=True))
    scales = (largest / -MIDDLE).to(torch.bfloat16)
    divisors = torch.where(scales == 0, 1.0, scales.float())
    codes = (padded / divisors).round().clamp(-MIDDLE, MIDDLE - 1).flatten(1)[:, :columns] + MIDDLE
    return Int4Matrix(pack_pairs(codes.to(torch.uint8)), scales.squeeze(-1), None, group, columns)
