"""Internal sequence ids: u64, consecutive within a request, never reused, not even by the next scheduler process."""

from __future__ import annotations

import time


class SequenceIds:
    """Counts up from the microsecond in which the process started, 4096 ids apart from the next one's.

    So a process can't catch up with its successor's start, as long as it takes less than 4 billion a second.
    """

    def __init__(self) -> None:
        self._next = time.time_ns() // 1000 << 12

    def take(self, count: int) -> int:
        """The first of `count` consecutive fresh ids."""
        first = self._next
        self._next += count
        return first
