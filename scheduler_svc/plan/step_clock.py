"""Foretells how long a runner's steps take, from how long steps of about that size took.

Sizes are positions, in classes an eighth of their size wide. Of a class the shortest of the last few steps counts: who
plans late by a forecast must not be late because one step was slow.
"""

from __future__ import annotations

from collections import defaultdict, deque

_REMEMBERED = 8


class StepClock:
    """Of one runner."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def record(self, positions: int, seconds: float) -> None:
        """A step of so many positions took so long."""
        self._seconds[_size_class(positions)].append(seconds)

    def least_s(self, positions: int) -> float:
        """Seconds that a step of so many positions takes at least; 0 where none of about that size was seen."""
        return min(self._seconds.get(_size_class(positions), (0.0,)))


def _size_class(positions: int) -> int:
    """Its four leading bits and their place."""
    if positions < 16:
        return positions
    shift = positions.bit_length() - 4
    return (shift << 4) + (positions >> shift)
