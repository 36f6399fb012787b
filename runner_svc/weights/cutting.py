"""Cuts matrices where a rank's part begins and ends, whatever their format.

A part keeps the format where that can be cut there. Otherwise it has smaller groups or blocks with the same scales, and
if even these do not fit, it becomes plain numbers. No number of a weight changes.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.weights.matrix import JoinedMatrix, Matrix, joined
from runner_svc.weights.matrix_part import MatrixPart, Region
from runner_svc.weights.plain_matrix import PlainMatrix


def part_of(matrix: Matrix, part: MatrixPart, dtype: torch.dtype) -> Matrix:
    """Returns the part, which shares no memory with the whole. `dtype`: of what becomes plain."""
    return joined([compact(region_of(matrix, region, dtype)) for region in part.regions])


def region_of(matrix: Matrix, region: Region, dtype: torch.dtype) -> Matrix:
    """Returns a region, a view where that is possible; see `part_of`."""
    rows, columns = region.rows or slice(0, matrix.size[0]), region.columns or slice(0, matrix.size[1])
    if isinstance(matrix, JoinedMatrix):
        return joined([region_of(part, own, dtype) for part, own in _parts_of(matrix, rows, columns)])
    finer = matrix.finer(rows, columns)
    if finer is not None:
        return finer.cut(rows, columns)
    units = matrix.cuts
    outer = Region(rows, columns).outward((units.rows, units.columns), matrix.size)
    assert outer.rows is not None and outer.columns is not None, "both are given"
    inner = Region(rows, columns).within(outer)
    return PlainMatrix(matrix.cut(outer.rows, outer.columns).dequantized()[inner.rows, inner.columns].to(dtype))


def padded(matrix: Matrix, rows: int, columns: int, dtype: torch.dtype) -> Matrix:
    """Returns the matrix with zeros beneath its rows and behind its columns. `dtype`: see `part_of`."""
    if matrix.size == (rows, columns):
        return matrix
    whole = matrix.with_zeros(rows, columns)
    if whole is not None:
        return whole
    missing = columns - matrix.size[1], rows - matrix.size[0]
    return PlainMatrix(functional.pad(matrix.dequantized().to(dtype), (0, missing[0], 0, missing[1])))


def compact(matrix: Matrix) -> Matrix:
    """Returns the matrix in memory of its own, so that what it is a view of can be freed."""
    if isinstance(matrix, JoinedMatrix):
        return JoinedMatrix(tuple(compact(part) for part in matrix.parts))
    tensors = {each.name: getattr(matrix, each.name) for each in fields(matrix)}  # type: ignore[arg-type]
    own = {
        name: value.clone(memory_format=torch.contiguous_format) for name, value in tensors.items() if _is_view(value)
    }
    return replace(matrix, **own) if own else matrix  # type: ignore[type-var]


def _is_view(value: object) -> bool:
    if not isinstance(value, Tensor):
        return False
    return not value.is_contiguous() or value.untyped_storage().nbytes() > value.numel() * value.element_size()


def _parts_of(matrix: JoinedMatrix, rows: slice, columns: slice) -> list[tuple[Matrix, Region]]:
    """Returns what the rows are of each part that has some of them."""
    found, begin = [], 0
    for part in matrix.parts:
        end = begin + part.size[0]
        first, last = max(rows.start, begin), min(rows.stop, end)
        if first < last:
            found.append((part, Region(slice(first - begin, last - begin), columns)))
        begin = end
    return found
