"""Tensor maps (CUtensorMap): how Hopper's copy engine finds rows of heads in queries and in the paged cache.

Both are seen as [planes, rows, 64]: rows are positions, a plane is one of the 64-element parts of one of the heads.
The driver is called through ctypes: it is one function.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

PLANE = 64
"""Elements of a row in a plane: 128 bytes, which the copies swizzle."""

_MAP_BYTES = 128
_ALIGNMENT = 64
_SCALAR_BYTES = 2
_UINT16 = 1  # CUtensorMapDataType: any 16-bit type, as copies only fill with zeros
_SWIZZLE_128B = 3
_PROMOTE_256B = 3


class TensorMapError(RuntimeError):
    """The driver refused a tensor map."""


def heads_map(address: int, num_heads: int, head_dim: int, rows: int, row_stride: int, box: Sequence[int]) -> bytes:
    """The map of 16-bit [rows, num_heads, head_dim] with `row_stride` elements between rows.

    `box` is what one copy brings: (rows, planes). Raises TensorMapError.
    """
    planes = num_heads * head_dim // PLANE
    buffer = ctypes.create_string_buffer(_MAP_BYTES + _ALIGNMENT)
    aligned = -(-ctypes.addressof(buffer) // _ALIGNMENT) * _ALIGNMENT
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        _UINT16,
        3,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 3)(PLANE, rows, planes),
        (ctypes.c_uint64 * 2)(row_stride * _SCALAR_BYTES, PLANE * _SCALAR_BYTES),
        (ctypes.c_uint32 * 3)(PLANE, *box),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        0,
        _SWIZZLE_128B,
        _PROMOTE_256B,
        0,
    )
    if status:
        raise TensorMapError(f"a tensor map of {rows} rows with stride {row_stride} at {address:#x}: error {status}")
    return ctypes.string_at(aligned, _MAP_BYTES)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
