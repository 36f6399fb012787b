"""Internal sequence ids: u64, consecutive within a request, never reused, not even by the next scheduler process."""

from __future__ import annotations

import time


class SequenceIds:
    """Counts up from the second in which the process started, 2^32 ids apart from the next second's."""

    def __init__(self) -> None:
        self._next = int(time.time()) << 32

    def take(self, count: int) -> int:
        """The first of `count` consecutive fresh ids."""
        first = self._next
        self._next += count
        return first
