"""Conversion between Python lists and the engine's packed columns: little-endian arrays in `bytes`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def int32_list(column: bytes) -> list[int]:
    """Returns the int32 values of a column."""
    values: list[int] = np.frombuffer(column, "<i4").tolist()
    return values


def uint64_list(column: bytes) -> list[int]:
    """Returns the uint64 values of a column."""
    values: list[int] = np.frombuffer(column, "<u8").tolist()
    return values


def float32_list(column: bytes) -> list[float]:
    """Returns the float32 values of a column."""
    values: list[float] = np.frombuffer(column, "<f4").tolist()
    return values


def int32_bytes(values: Sequence[int]) -> bytes:
    """Returns the values as a column of int32."""
    return np.asarray(values, "<i4").tobytes()
