"""Packed columns of the engine's messages: little-endian arrays in `bytes`, as Python lists and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def int32_list(column: bytes) -> list[int]:
    """The int32 values of a column."""
    values: list[int] = np.frombuffer(column, "<i4").tolist()
    return values


def uint64_list(column: bytes) -> list[int]:
    """The uint64 values of a column."""
    values: list[int] = np.frombuffer(column, "<u8").tolist()
    return values


def float32_list(column: bytes) -> list[float]:
    """The float32 values of a column."""
    values: list[float] = np.frombuffer(column, "<f4").tolist()
    return values


def int32_bytes(values: Sequence[int]) -> bytes:
    """A column of int32 values."""
    return np.asarray(values, "<i4").tobytes()
