"""Matrices of FP8 numbers (e4m3) with scales for whole blocks: W[o, i] = codes[o, i] * scales[o // R, i // C].

A checkpoint's scale per channel is a block of one row and all columns. One per tensor is held as one per channel, so
that matrices of several tensors can be merged without a second rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from runner_svc.weights.activation_rounding import (
    E4M3,
    GroupRounding,
    Rounding,
    TokenRounding,
    scale_of,
    to_e4m3,
)
from runner_svc.weights.cpu_products import TILE_ROWS, bfloat16_product
from runner_svc.weights.matrix import Cuts, Matrix, Product, extended
from runner_svc.weights.matrix_part import common_unit

LEAST_BLOCK = 16
"""Smaller blocks than multiples of this are not made."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Matrix(Matrix):
    """`block` is the rows and columns of a scale; blocks at the lower and right edges may be smaller."""

    codes: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # float32 [ceil(out / block rows), ceil(in / block columns)]
    rounding: Rounding
    block: tuple[int, int] | None = None
    """None: a scale per row."""

    @property
    def format(self) -> str:
        weights = "per channel" if self.block is None else f"in blocks of {self.block[0]} x {self.block[1]}"
        return f"FP8 {weights}, {self.rounding.name}"

    @property
    def size(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + 4 * self.scales.numel()

    @property
    def cuts(self) -> Cuts:
        """At blocks of weights and at groups of activations."""
        rows, columns = self.block or (1, 1)
        return Cuts(rows, max(columns, self.rounding.columns))

    def cut(self, rows: slice, columns: slice) -> Fp8Matrix:
        """Returns a part; the scales per token of a part's activations are then made by the caller's cut of x."""
        self.cuts.check(self.size, rows, columns)
        high, wide = self.block or (1, max(self.size[1], 1))
        scales = self.scales[rows.start // high : -(-rows.stop // high)]
        if self.block is not None:
            scales = scales[:, columns.start // wide : -(-columns.stop // wide)]
        return replace(self, codes=self.codes[rows, columns], scales=scales)

    def finer(self, rows: slice, columns: slice) -> Fp8Matrix | None:
        """Returns it in blocks at which rows and columns begin and end, which may be smaller ones.

        Activations are then rounded in as many columns as a block has.
        """
        if self.block is None:
            return Matrix.finer(self, rows, columns)
        high, wide = common_unit(self.block[0], rows, self.size[0]), common_unit(self.block[1], columns, self.size[1])
        if (high, wide) == self.block:
            return self
        if high % LEAST_BLOCK or wide % LEAST_BLOCK:
            return None
        scales = self.scales.repeat_interleave(self.block[0] // high, dim=0)[: -(-self.size[0] // high)]
        scales = scales.repeat_interleave(self.block[1] // wide, dim=1)[:, : -(-self.size[1] // wide)]
        rounding = GroupRounding(wide) if isinstance(self.rounding, GroupRounding) else self.rounding
        return replace(self, scales=scales.contiguous(), block=(high, wide), rounding=rounding)

    def with_zeros(self, rows: int, columns: int) -> Fp8Matrix:
        codes = extended(_bytes(self.codes), rows, columns).view(E4M3)
        high, wide = self.block or (1, columns)
        scales = extended(self.scales, -(-rows // high), -(-columns // wide))
        return replace(self, codes=codes, scales=scales)

    def reordered(self, order: Tensor) -> Fp8Matrix:
        if self.block is not None and self.block[0] != 1:
            raise ValueError(f"rows of a matrix in {self.format} can't be moved one by one")
        return replace(self, codes=_bytes(self.codes)[order].view(E4M3), scales=self.scales[order])

    def beneath(self, others: list[Matrix]) -> Fp8Matrix | None:
        like = [other for other in others if isinstance(other, Fp8Matrix)]
        if len(like) < len(others) or any((each.block, each.rounding) != (self.block, self.rounding) for each in like):
            return None
        parts = [self, *like]
        if self.block is not None and any(part.size[0] % self.block[0] for part in parts[:-1]):
            return None  # a block would lie in two matrices
        codes = torch.cat([_bytes(part.codes) for part in parts]).view(E4M3)
        return replace(self, codes=codes, scales=torch.cat([part.scales for part in parts]))

    def dequantized(self) -> Tensor:
        numbers = _numbers(self.codes)
        if self.block is None:
            return numbers.mul_(self.scales)
        high, wide = self.block
        scales = self.scales.repeat_interleave(high, dim=0)[: self.size[0]]
        return numbers * scales.repeat_interleave(wide, dim=1)[:, : self.size[1]]

    def rounded(self, x: Tensor) -> Tensor:
        return self.rounding.rounded(x)

    def product(self, bias: Tensor | None, *, keep_plain: bool) -> Product:
        """Returns y = x W^T + b on the CPU; without `keep_plain` by numbers in bfloat16, which take 2 bytes each.

        Dequantizing them for each product takes 40 times as long.
        """
        if keep_plain:
            return Matrix.product(self, bias, keep_plain=True)
        in_blocks = self.block is not None
        numbers = torch.empty(self.size, dtype=torch.bfloat16, device=self.codes.device)
        for begin in range(0, self.size[0], TILE_ROWS):
            end = min(begin + TILE_ROWS, self.size[0])
            # The codes are numbers of bfloat16; scales of blocks round them.
            numbers[begin:end] = self._tile(begin, end) if in_blocks else _numbers(self.codes[begin:end])
        multiply, rounded = bfloat16_product(numbers), self.rounding.rounded  # and not `self`, which has the codes
        scales = None if in_blocks else self.scales.flatten()

        def product(x: Tensor) -> Tensor:
            y = multiply(rounded(x))
            if scales is not None:
                y.mul_(scales)
            return y if bias is None else y.add_(bias)

        return product


def to_fp8(weight: Tensor) -> Fp8Matrix:
    """Quantizes W [out, in] per channel by rounding to nearest, with activations per token."""
    numbers = weight.float()
    scales = scale_of(numbers.abs().amax(dim=1, keepdim=True))
    return Fp8Matrix(to_e4m3(numbers / scales), scales, TokenRounding())


def to_fp8_blocks(weight: Tensor, side: int = 128) -> Fp8Matrix:
    """Quantizes W [out, in] in square blocks by rounding to nearest, with activations per token and `side` columns."""
    out, width = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -width % side, 0, -out % side))
    blocks = padded.unflatten(0, (-1, side)).unflatten(2, (-1, side))  # [block rows, side, block columns, side]
    scales = scale_of(blocks.abs().amax(dim=(1, 3)))
    codes = to_e4m3(blocks / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)
    codes = _bytes(codes)[:out, :width].contiguous().view(E4M3)
    return Fp8Matrix(codes, scales, GroupRounding(side), (side, side))


def per_channel(scale: Tensor, rows: int) -> Tensor:
    """Returns float32 [rows, 1] of a checkpoint's scale, which has one element or one for each row."""
    return cast(Tensor, scale.float().reshape(-1, 1).expand(rows, 1).contiguous())


def has_nan(codes: Tensor) -> bool:
    """Returns whether some of e4m3's codes stand for NaN: those whose last seven bits are set."""
    parts = _bytes(codes).split(TILE_ROWS)
    return len(codes) > 0 and bool(torch.stack([((part & 127) == 127).any() for part in parts]).any())


def _numbers(codes: Tensor) -> Tensor:
    """Returns float32 [out, in] by a table: on a CPU, torch's conversion takes four times as long."""
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(E4M3).float()
    return table.index_select(0, _bytes(codes).reshape(-1).int()).view(codes.shape)


def _bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)  # torch indexes and joins those on every device
