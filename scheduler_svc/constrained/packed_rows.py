"""Builds the message with a plan's masks in a few passes over all rows.

Building a message row by row costs half a microsecond per row; parsing it costs a tenth of that. So numpy lays the
rows out in the wire format, and they are parsed at once. Long masks are added one by one, because there the
additional copy costs more.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from roster_protos import plan_pb2

FEW_ROWS = 4
"""Rows below which one message each takes less time than numpy's calls."""
LONG_MASK = 12_000
"""Bytes."""

_ROW = np.arange(0, 35, 7)
_MORE = np.array([0x80] * 4 + [0], np.uint8)
"""Continuation bits: a row's number always takes five bytes, which every protobuf parser accepts."""


def mask_bytes(vocab_size: int) -> int:
    """Returns the size of a mask: a bit for each id, in words of 32."""
    return -(-vocab_size // 32) * 4


def every_token(vocab_size: int) -> bytes:
    """Returns the mask that allows every token."""
    return b"\xff" * mask_bytes(vocab_size)


def only_token(vocab_size: int, token: int) -> bytes:
    """Returns the mask that allows one token."""
    return (1 << token).to_bytes(mask_bytes(vocab_size), "little")


class PackedRows:
    """Packs masks of one size, in bytes."""

    def __init__(self, mask_bytes: int) -> None:
        self._size = mask_bytes
        head = bytes((_tag(plan_pb2.RowMask, "row"), *bytes(5), _tag(plan_pb2.RowMask, "bits"), *_varint(mask_bytes)))
        self._head = np.array((_tag(plan_pb2.Masks, "rows"), *_varint(len(head) + mask_bytes), *head), np.uint8)
        self._row_at = len(self._head) - len(head) + 1
        self._lines = np.zeros((0, len(self._head) + mask_bytes), np.uint8)
        self._numbers: list[int] = []

    def prepare(self, rows: list[int]) -> None:
        """Prepares `add` for these rows, which may be known before their masks are."""
        if len(rows) >= FEW_ROWS and self._size <= LONG_MASK:
            self._lines_of(rows)

    def add(self, masks: plan_pb2.Masks, rows: list[int], memory: mmap.mmap | bytes, places: Sequence[int]) -> None:
        """Adds these rows to `masks`; their masks are in `memory` at `places`, counted in masks."""
        size = self._size
        if len(rows) < FEW_ROWS or size > LONG_MASK:
            add = masks.rows.add
            for row, place in zip(rows, places, strict=True):
                add(row=row, bits=memory[place * size : (place + 1) * size])
            return
        lines, head = self._lines_of(rows), len(self._head)
        shared = np.frombuffer(memory, np.uint8, (places[-1] + 1) * size).reshape(-1, size)
        lines[:, head:] = shared if isinstance(places, range) else shared[places]
        masks.MergeFromString(lines.data)  # type: ignore[arg-type]  # any buffer is accepted

    def _lines_of(self, rows: list[int]) -> npt.NDArray[np.uint8]:
        """Returns the wire format of these rows, [rows, bytes], complete but for the masks."""
        count, at = len(rows), self._row_at
        if count > len(self._lines):
            self._lines, self._numbers = np.zeros((2 * count, self._lines.shape[1]), np.uint8), []
            self._lines[:, : len(self._head)] = self._head
        if self._numbers[:count] != rows:  # unchanged from plan to plan while no sequence ends
            self._lines[:count, at : at + 5] = (np.array(rows)[:, None] >> _ROW & 0x7F) | _MORE
            self._numbers = rows
        return self._lines[:count]


def _tag(message: type[plan_pb2.Masks] | type[plan_pb2.RowMask], field: str) -> int:
    """Returns the tag of a field: of a varint for a number, of length-delimited bytes otherwise."""
    described = message.DESCRIPTOR.fields_by_name[field]
    return described.number << 3 | (0 if described.cpp_type == described.CPPTYPE_UINT32 else 2)


def _varint(number: int) -> bytes:
    octets = bytearray()
    while number > 0x7F:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*octets, number))
