"""The memory that the ranks of a group and their launcher share: where in it each part lies.

It is a file without a name, which the launcher's children inherit: it is gone with the last of them.
"""

from __future__ import annotations

import mmap
import os

BOARD_BYTES = 1 << 18
RING_HEADER_BYTES = 1 << 12
RING_BYTES = 1 << 22
"""Bytes of records that a rank may lag behind: several plans with the masks of all rows, thousands without."""
MOST_RANKS = 64


def create() -> int:
    """Returns the descriptor of a new file of zeros."""
    descriptor = os.memfd_create("roster-ranks")
    os.ftruncate(descriptor, BOARD_BYTES + RING_HEADER_BYTES + RING_BYTES)
    return descriptor


def attach(descriptor: int) -> mmap.mmap:
    """Returns the file's memory."""
    return mmap.mmap(descriptor, BOARD_BYTES + RING_HEADER_BYTES + RING_BYTES)
