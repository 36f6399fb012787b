"""Times of a runner's last steps, by kind and size.

Sizes are positions, in classes an eighth of their size wide. Steps that decode only are one kind, steps with parts of
prompts the other.
"""

from __future__ import annotations

from collections import defaultdict, deque

_REMEMBERED = 8
"""Steps of a class that count: a median of them follows a change within four steps."""


class RecentSteps:
    """Step times of one runner, in seconds."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def record(self, positions: int, prefills: bool, seconds: float) -> None:
        """Records a step's size, whether it computed parts of prompts, and its time."""
        self._seconds[_class_of(positions, prefills)].append(seconds)

    def median_s(self, positions: int, prefills: bool) -> float:
        """Returns the median time of the last steps of this kind and about this size; 0 if there was none."""
        seconds = self._seconds.get(_class_of(positions, prefills))
        return sorted(seconds)[len(seconds) // 2] if seconds else 0.0


def _class_of(positions: int, prefills: bool) -> int:
    """Returns the class: the four leading bits and their position; negative with parts of prompts."""
    if positions >= 16:
        shift = positions.bit_length() - 4
        positions = (shift << 4) + (positions >> shift)
    return -positions if prefills else positions
