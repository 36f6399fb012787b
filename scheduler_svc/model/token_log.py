"""The tokens of a sequence as a growing int32 column.

An array, not a list: a list's numbers are objects scattered in memory, 36 bytes each, created by every step and visited
again at every end. The array's bytes equal those of the messages' columns, since supported machines are little-endian.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TypeAlias

TokenLog: TypeAlias = "array[int]"


def token_log(*columns: bytes) -> TokenLog:
    """Returns the tokens of int32 columns, concatenated. Raises ValueError if a column ends within a token."""
    log = array("i")
    for column in columns:
        log.frombytes(column)
    return log


def logged(tokens: Iterable[int]) -> TokenLog:
    """Returns a log of these tokens."""
    return array("i", tokens)
