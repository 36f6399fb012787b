"""Internal sequence ids: u64, consecutive within a request, never reused, not even by the next scheduler process."""

from __future__ import annotations

import time
from collections.abc import Iterable

MOST = 1 << 63
"""A column of ids is uint64: there is room behind the greatest that is believed."""


class SequenceIds:
    """Counts up from the microsecond in which the process started, 4096 ids apart from the next one's.

    So a process can't catch up with its successor's start, as long as it takes less than 4 billion a second. Where the
    successor's clock is behind, it passes the ids that it finds on its runners (`pass_by`).
    """

    def __init__(self) -> None:
        self._next = time.time_ns() // 1000 << 12

    def next(self, count: int) -> int:
        """The first of `count` consecutive fresh ids."""
        first = self._next
        self._next += count
        return first

    def pass_by(self, taken: Iterable[int]) -> None:
        """From now on ids are greater than these, which an earlier process has given; impossible ones aside."""
        self._next = max((self._next, *(one + 1 for one in taken if one < MOST)))
