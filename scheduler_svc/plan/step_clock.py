"""Predicts how long a runner's steps take, from the duration of steps of about the same size.

Sizes are positions, in classes an eighth of their size wide.
"""

from __future__ import annotations

from collections import defaultdict, deque

_REMEMBERED = 8


class StepClock:
    """Step durations of one runner."""

    def __init__(self, tile_tokens: int = 1) -> None:
        """`tile_tokens`: positions per tile; a step with prompts takes as long as its tiles when full."""
        self._tile = max(1, tile_tokens)
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._rates: defaultdict[tuple[bool, int], deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def record(self, positions: int, seconds: float) -> None:
        """Records a step's size and duration for `least_s`."""
        self._seconds[_size_class(positions)].append(seconds)

    def least_s(self, positions: int) -> float:
        """Returns the minimum duration in seconds of the last steps of about this size; 0 if none was recorded.

        A plan that is delayed by this prediction is not late because one step was slow.
        """
        return min(self._seconds.get(_size_class(positions), (0.0,)))

    def learn(self, positions: int, prefills: bool, seconds: float) -> None:
        """Records a step for `expected_s`, with whether it computed parts of prompts."""
        charged = self._charged(positions, prefills)
        self._rates[prefills, _size_class(positions)].append(seconds / charged)

    def expected_s(self, positions: int, prefills: bool) -> float:
        """Returns the median duration in seconds of the last steps of this kind and about this size; 0 if none was
        recorded. With prompts it is proportional to the positions, in whole tiles."""
        rates = self._rates.get((prefills, _size_class(positions)))
        return sorted(rates)[len(rates) // 2] * self._charged(positions, prefills) if rates else 0.0

    def _charged(self, positions: int, prefills: bool) -> int:
        return -(-positions // self._tile) * self._tile if prefills else 1


def _size_class(positions: int) -> int:
    """Returns the class: the four leading bits and their position."""
    if positions < 16:
        return positions
    shift = positions.bit_length() - 4
    return (shift << 4) + (positions >> shift)
