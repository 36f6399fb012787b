"""Tensor maps (CUtensorMap): how Hopper's copy engine finds rows of heads in queries and in the paged cache.

What has 16-bit elements is seen as [planes, rows, 64]: rows are positions, a plane is one of the 64-element parts of
one of the heads. Heads that do not consist of such parts are planes themselves, of which a copy brings 64 columns, with
zeros beyond the head. An FP8 cache is seen as [heads, rows, head_dim] bytes, and copied as it is. The driver is called
through ctypes: it is one function.
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
_UINT8, _UINT16 = 0, 1  # CUtensorMapDataType: for any type of that size, as copies only fill with zeros
_SWIZZLE_NONE, _SWIZZLE_128B = 0, 3
_PROMOTE_256B = 3


class TensorMapError(RuntimeError):
    """The driver refused a tensor map."""


def heads_map(address: int, num_heads: int, head_dim: int, rows: int, row_stride: int, box: Sequence[int]) -> bytes:
    """The map of 16-bit [rows, num_heads, head_dim] with `row_stride` elements between rows.

    `box` is what one copy brings of 64 columns: (rows, planes). Raises TensorMapError.
    """
    columns = head_dim if head_dim % PLANE else PLANE
    sizes = (columns, rows, num_heads * head_dim // columns)
    strides = (row_stride * _SCALAR_BYTES, columns * _SCALAR_BYTES)
    return _encode(address, _UINT16, sizes, strides, (PLANE, *box), _SWIZZLE_128B)


def bytes_map(address: int, num_heads: int, head_dim: int, rows: int, box_rows: int) -> bytes:
    """The map of one-byte [rows, num_heads, head_dim]; one copy brings `box_rows` rows of a head.

    Raises TensorMapError.
    """
    strides = (num_heads * head_dim, head_dim)
    return _encode(address, _UINT8, (head_dim, rows, num_heads), strides, (head_dim, box_rows, 1), _SWIZZLE_NONE)


def _encode(
    address: int, dtype: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
) -> bytes:
    """Sizes in elements and strides in bytes, the innermost size first, which has no stride."""
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
        _PROMOTE_256B,
        0,
    )
    if status:
        raise TensorMapError(f"a tensor map of sizes {sizes}, strides {strides}, at {address:#x}: error {status}")
    return ctypes.string_at(aligned, _MAP_BYTES)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
