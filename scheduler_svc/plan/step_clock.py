"""Predicts how long a runner's steps take, from the duration of steps of about the same size.

Sizes are positions, in classes an eighth of their size wide. The shortest of the last few steps of a class counts: a
plan that is delayed by the prediction must not be late because one step was slow.
"""

from __future__ import annotations

from collections import defaultdict, deque

_REMEMBERED = 8


class StepClock:
    """Step durations of one runner."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def record(self, positions: int, seconds: float) -> None:
        """Records a step's size and duration."""
        self._seconds[_size_class(positions)].append(seconds)

    def least_s(self, positions: int) -> float:
        """Returns the minimum duration in seconds of a step of about this size; 0 if none was recorded."""
        return min(self._seconds.get(_size_class(positions), (0.0,)))


def _size_class(positions: int) -> int:
    """Returns the class: the four leading bits and their position."""
    if positions < 16:
        return positions
    shift = positions.bit_length() - 4
    return (shift << 4) + (positions >> shift)
