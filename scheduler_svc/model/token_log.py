"""The tokens of a sequence as a growing int32 column.

An array, not a list: a list's numbers are objects all over the memory, 36 bytes each, which every step makes and every
end visits once more. Its bytes are those of the messages' columns, as machines here are little-endian too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TypeAlias

TokenLog: TypeAlias = "array[int]"


def token_log(*columns: bytes) -> TokenLog:
    """The tokens of int32 columns, one after the other. Raises ValueError for half a token."""
    log = array("i")
    for column in columns:
        log.frombytes(column)
    return log


def logged(tokens: Iterable[int]) -> TokenLog:
    """A log of these tokens."""
    return array("i", tokens)
