"""Tensor maps (CUtensorMap): layouts with which Hopper's copy engine reads queries and the paged cache.

Tensors of 16-bit elements are mapped as [planes, rows, 64]: rows are positions, a plane is one 64-element part of one
head. If heads are not a multiple of 64 elements, each head is a plane; a copy reads 64 of its columns, with zeros
beyond the head. An FP8 cache is mapped as [heads, rows, head_dim] bytes and copied unchanged. The driver function is
called through ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

PLANE = 64
"""Elements of a row in a plane: 128 bytes, the width of the copies' swizzle."""

_BYTES_PLANE = 128
_MAP_BYTES = 128
_ALIGNMENT = 64
_SCALAR_BYTES = 2
_UINT8, _UINT16 = 0, 1  # CUtensorMapDataType; used for any type of that size, as copies only fill with zeros
_SWIZZLE_NONE, _SWIZZLE_128B = 0, 3
_PROMOTE_256B = 3


class TensorMapError(RuntimeError):
    """The driver refused a tensor map."""


def heads_map(
    address: int,
    num_heads: int,
    head_dim: int,
    rows: int,
    row_stride: int,
    box: Sequence[int],
    *,
    read_once: bool = False,
) -> bytes:
    """Returns the map of 16-bit [rows, num_heads, head_dim] with `row_stride` elements between rows.

    `box` is the size of one copy of 64 columns: (rows, planes). What is `read_once` and larger than L2, as weights, is
    read faster without asking L2 for more bytes than a copy needs. Raises TensorMapError.
    """
    columns = head_dim if head_dim % PLANE else PLANE
    sizes = (columns, rows, num_heads * head_dim // columns)
    strides = (row_stride * _SCALAR_BYTES, columns * _SCALAR_BYTES)
    return _encode(address, _UINT16, sizes, strides, (PLANE, *box), _SWIZZLE_128B, 0 if read_once else _PROMOTE_256B)


def bytes_map(address: int, num_heads: int, head_dim: int, rows: int, box_rows: int) -> bytes:
    """Returns the map of one-byte [rows, num_heads, head_dim]; one copy reads `box_rows` rows of a head.

    Raises TensorMapError.
    """
    strides = (num_heads * head_dim, head_dim)
    return _encode(
        address, _UINT8, (head_dim, rows, num_heads), strides, (head_dim, box_rows, 1), _SWIZZLE_NONE, _PROMOTE_256B
    )


def codes_map(address: int, rows: int, width: int, box_rows: int, *, read_once: bool = False) -> bytes:
    """Returns the map of one-byte [rows, width], contiguous; one copy reads 128 columns of `box_rows` rows.

    `width` is a multiple of 16; columns and rows beyond are read as zeros. `read_once` is as in `heads_map`. Raises
    TensorMapError.
    """
    return _encode(
        address,
        _UINT8,
        (width, rows, 1),
        (width, width * rows),
        (_BYTES_PLANE, box_rows, 1),
        _SWIZZLE_128B,
        0 if read_once else _PROMOTE_256B,
    )


def _encode(
    address: int,
    dtype: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
    promotion: int,
) -> bytes:
    """Encodes a map; sizes are in elements and strides in bytes, innermost first. The innermost size has no stride."""
    buffer = ctypes.create_string_buffer(_MAP_BYTES + _ALIGNMENT)
    aligned = -(-ctypes.addressof(buffer) // _ALIGNMENT) * _ALIGNMENT
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        dtype,
        3,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 3)(*sizes),
        (ctypes.c_uint64 * 2)(*strides),
        (ctypes.c_uint32 * 3)(*box),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        0,
        swizzle,
        promotion,
        0,
    )
    if status:
        raise TensorMapError(
            f"the driver refused a tensor map of sizes {sizes}, strides {strides}, at {address:#x}: error {status}"
        )
    return ctypes.string_at(aligned, _MAP_BYTES)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
