"""Quantiles of how much longer steps take than predicted."""

from __future__ import annotations

import math

_CLASS = 0.01
_MOST = 4.0
_NUM_CLASSES = int(math.log(_MOST) / _CLASS) + 2
_FADE = 1.001
"""Each ratio weighs this much more than the one before: after a thousand, about a third is left."""
_ASSUMED = ((1.03, 38.0), (1.06, 1.5), (1.12, 0.5))
"""Ratios, and how many of each are assumed before any was seen."""


class ErrorTail:
    """Histogram of the ratio taken / predicted, in classes of 1% above 1; earlier ratios fade."""

    def __init__(self) -> None:
        self._counts = [0.0] * _NUM_CLASSES
        self._total = 0.0
        self._weight = 1.0
        for ratio, count in _ASSUMED:
            self._counts[_class_of(ratio)] += count
            self._total += count

    def add(self, ratio: float) -> None:
        """Records a ratio."""
        self._counts[_class_of(ratio)] += self._weight
        self._total += self._weight
        self._weight *= _FADE
        if self._weight > 1e6:
            self._counts = [count / self._weight for count in self._counts]
            self._total /= self._weight
            self._weight = 1.0

    def quantile(self, share: float) -> float:
        """Returns the ratio, at least 1, that a share `share` of the steps do not exceed."""
        above = (1 - share) * self._total
        for place in range(_NUM_CLASSES - 1, 0, -1):
            above -= self._counts[place]
            if above < 0:
                return math.exp(_CLASS * place)
        return 1.0


def _class_of(ratio: float) -> int:
    """Returns the ratio's class; class n > 0 holds those up to exp(n * _CLASS)."""
    return math.ceil(math.log(min(_MOST, ratio)) / _CLASS) if ratio > 1 else 0
