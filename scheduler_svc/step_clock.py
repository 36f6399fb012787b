"""Foretells how long a runner's steps take, from how long steps of about that size took.

Sizes are positions, in classes an eighth of their size wide. Of a class the shortest of the last few steps counts: who
plans late by a forecast must not be late because one step was slow.
"""

from __future__ import annotations

from collections import deque

_REMEMBERED = 8


class StepClock:
    """Of one runner."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def record(self, positions: int, seconds: float) -> None:
        """A step of so many positions took so long."""
        size = _size_class(positions)
        remembered = self._seconds.get(size)
        if remembered is None:
            remembered = self._seconds[size] = deque(maxlen=_REMEMBERED)
        remembered.append(seconds)

    def least_s(self, positions: int) -> float:
        """Seconds that a step of so many positions takes at least; 0 where none of about that size was seen."""
        return min(self._seconds.get(_size_class(positions), (0.0,)))


def _size_class(positions: int) -> int:
    """Its four leading bits and their place."""
    shift = max(0, positions.bit_length() - 4)
    return (shift << 4) + (positions >> shift)
