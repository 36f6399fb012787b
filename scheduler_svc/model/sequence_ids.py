"""Internal sequence ids: u64, consecutive within a request, never reused, not even by the next scheduler process."""

from __future__ import annotations

import time
from collections.abc import Iterable

MOST = 1 << 63
"""Exclusive bound of plausible ids. Columns are uint64, so ids above it remain representable."""


class SequenceIds:
    """Counts up from the microsecond in which the process started, times 4096.

    So a process can't reach its successor's first id as long as it uses fewer than 4 billion a second. If the
    successor's clock is behind, it skips the ids that it finds on its runners (`pass_by`).
    """

    def __init__(self) -> None:
        self._next = time.time_ns() // 1000 << 12

    def next(self, count: int) -> int:
        """Returns the first of `count` consecutive unused ids."""
        first = self._next
        self._next += count
        return first

    def pass_by(self, taken: Iterable[int]) -> None:
        """Makes later ids greater than these, which an earlier process has used; implausible ones are ignored."""
        self._next = max((self._next, *(one + 1 for one in taken if one < MOST)))
