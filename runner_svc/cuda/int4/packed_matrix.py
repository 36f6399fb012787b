"""The layout of 4-bit matrices that the kernels read (kernels/int4_tile.cuh): tiles of 64 rows by 128 columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from runner_svc.weights.int4_matrix import MIDDLE, Int4Matrix
from runner_svc.weights.int4_packing import unpack_pairs
from runner_svc.weights.matrix import Cuts, Matrix

TILE_ROWS = 64
STEP = 128
"""Columns of a tile."""
GROUPS = (32, 64, 128)
"""Sizes of groups that the kernels know; larger ones are written as several of 128."""

STRIP_ROWS = 16
_STRIPS, _OCTET = TILE_ROWS // STRIP_ROWS, 8
# Halves of 64 columns of a tile, fragments of 16 columns, halves of a fragment, lanes of a quad, columns of a lane.
_COLUMNS = (2, 4, 2, 4, 2)


@dataclass(frozen=True, slots=True, eq=False)
class PackedInt4Matrix(Matrix):
    """An `Int4Matrix` in that layout. Rows and columns are padded with zeros to whole tiles."""

    tiles: Tensor  # uint8 [tiles of rows, tiles of columns, bytes of a tile]
    rows: int
    columns: int
    group: int  # of the kernels
    scale_dtype: torch.dtype
    has_zeros: bool
    order: Tensor | None
    """int64 [in], as in `Int4Matrix`."""
    format_name: str

    @property
    def format(self) -> str:
        """The format of the matrix that was packed."""
        return self.format_name

    @property
    def size(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def num_bytes(self) -> int:
        return self.tiles.numel() + (8 * self.columns if self.order is not None else 0)

    @property
    def cuts(self) -> Cuts:
        """It can't be cut."""
        return Cuts(self.rows, self.columns)

    def cut(self, rows: slice, columns: slice) -> PackedInt4Matrix:
        self.cuts.check(self.size, rows, columns)
        return self

    def reordered(self, order: Tensor) -> PackedInt4Matrix:
        """Raises ValueError: rows are moved before they are packed."""
        raise ValueError("rows of a packed matrix can't be moved")

    def beneath(self, others: list[Matrix]) -> None:
        return None

    def gathered(self, x: Tensor) -> Tensor:
        """Returns x [rows, in] with its columns in the order of the tiles."""
        return x if self.order is None else x[:, self.order]

    def dequantized(self) -> Tensor:
        """Returns the columns in the order in which x has them; takes several times the memory of the result."""
        weight = self._codes() - self._spread(self._zeros())
        weight = (weight * self._spread(self._scales()))[: self.rows, : self.columns]
        if self.order is None:
            return weight.contiguous()
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def _codes(self) -> Tensor:
        """Returns float32 [padded rows, padded columns]."""
        tiles, steps, num_bytes = self.tiles.shape
        strips = self.tiles.unflatten(-1, (_STRIPS, num_bytes // _STRIPS))[..., : STRIP_ROWS * STEP // 2]
        # [tile, step, strip, 64 columns, octet, quad, fragment, column, half of a fragment] of pairs of rows
        packed = strips.reshape(tiles, steps, _STRIPS, 2, _OCTET, 4, 4, 2, 2)
        pairs = torch.stack((packed & 15, packed >> 4), dim=-1)
        return pairs.permute(0, 2, 9, 4, 1, 3, 6, 8, 5, 7).reshape(tiles * TILE_ROWS, steps * STEP).float()

    def _scales(self) -> Tensor:
        begin, size = STRIP_ROWS * STEP // 2, STRIP_ROWS * STEP // self.group * self.scale_dtype.itemsize
        return self._of_rows(begin, size, self.scale_dtype).float()

    def _zeros(self) -> Tensor:
        if not self.has_zeros:
            return torch.full_like(self._scales(), MIDDLE)
        size = STRIP_ROWS * STEP // self.group
        return self._of_rows(self.tiles.shape[-1] // _STRIPS - size, size, torch.uint8).float()

    def _of_rows(self, begin: int, size: int, dtype: torch.dtype) -> Tensor:
        """Returns what every row and group has, [padded rows, groups]."""
        tiles, steps, num_bytes = self.tiles.shape
        strips = self.tiles.unflatten(-1, (_STRIPS, num_bytes // _STRIPS))[..., begin : begin + size]
        values = strips.contiguous().view(dtype).reshape(tiles, steps, _STRIPS, -1, _OCTET, 2)
        return values.permute(0, 2, 5, 4, 1, 3).reshape(tiles * TILE_ROWS, -1)

    def _spread(self, of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(self.group, dim=1)


def packed(matrix: Int4Matrix) -> PackedInt4Matrix | None:
    """Returns the matrix in the kernels' layout, on its device; None for sizes of groups that they do not know."""
    rows, columns = matrix.size
    group = _kernel_group(matrix.group, columns)
    if group is None:
        return None
    tiles, steps = -(-rows // TILE_ROWS), -(-columns // STEP)
    parts = [
        _packed_codes(unpack_pairs(matrix.codes, columns), tiles, steps),
        _packed_rows(_of_groups(matrix.scales, matrix.group, columns, group), tiles, steps, group),
    ]
    if matrix.zeros is not None:
        parts.append(_packed_rows(_of_groups(matrix.zeros, matrix.group, columns, group), tiles, steps, group))
    return PackedInt4Matrix(
        torch.cat(parts, dim=-1).flatten(2),
        rows,
        columns,
        group,
        matrix.scales.dtype,
        matrix.zeros is not None,
        matrix.order,
        matrix.format,
    )


def packed_tiles(matrix: Matrix) -> PackedInt4Matrix:
    """Returns the matrix itself. Raises TypeError for one in another layout."""
    if not isinstance(matrix, PackedInt4Matrix):
        raise TypeError(f"a matrix of packed 4-bit numbers is needed, not one in {matrix.format}")
    return matrix


def _kernel_group(group: int, columns: int) -> int | None:
    if group in GROUPS:
        return group
    return STEP if group % STEP == 0 or group >= columns else None


def _of_groups(values: Tensor, group: int, columns: int, kernel_group: int) -> Tensor:
    """Returns values [rows, groups] of groups of the kernels' size."""
    first_columns = torch.arange(0, columns, kernel_group, device=values.device)
    return values[:, first_columns // group]


def _packed_codes(codes: Tensor, tiles: int, steps: int) -> Tensor:
    """Returns uint8 [tiles, steps, strips, bytes] of uint8 codes [rows, columns]."""
    codes = pad(codes, (0, steps * STEP - codes.shape[1], 0, tiles * TILE_ROWS - codes.shape[0]))
    split = codes.reshape(tiles, _STRIPS, 2, _OCTET, steps, *_COLUMNS)
    pairs = split[:, :, 0] | (split[:, :, 1] << 4)
    # From [tile, strip, octet, step, 64 columns, fragment, half of a fragment, quad, column].
    return pairs.permute(0, 3, 1, 4, 2, 7, 5, 8, 6).reshape(tiles, steps, _STRIPS, -1)


def _packed_rows(values: Tensor, tiles: int, steps: int, group: int) -> Tensor:
    """Returns uint8 [tiles, steps, strips, bytes] of values [rows, groups]."""
    per_step = STEP // group
    values = pad(values, (0, steps * per_step - values.shape[1], 0, tiles * TILE_ROWS - values.shape[0]))
    split = values.reshape(tiles, _STRIPS, 2, _OCTET, steps, per_step)
    return split.permute(0, 4, 1, 5, 3, 2).reshape(tiles, steps, _STRIPS, -1).contiguous().view(torch.uint8)
