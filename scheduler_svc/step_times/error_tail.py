"""Quantiles of how much longer steps take than predicted."""

from __future__ import annotations

import math

_LEAST_S, _MOST_S = 20e-6, 4.0
"""Range of the classes: a timer's noise, and an outage."""
_CLASS = 0.08
"""Logarithm of the ratio of two classes' bounds: quantiles are exact to 8%."""
_NUM_CLASSES = int(math.log(_MOST_S / _LEAST_S) / _CLASS) + 2
_FADE = 1.002
"""Each delay weighs this much more than the one before: after 500, about a third is left."""
_ASSUMED = ((0.5e-3, 34.0), (1e-3, 4.0), (2e-3, 2.0))
"""Delays in seconds, and how many of each are assumed before any was seen."""


class ErrorTail:
    """Histogram of delays, the times taken minus those predicted, in classes 8% wide; earlier ones fade.

    Launch, link and the scheduler add time to a step whatever its size, so the difference counts and not the ratio.
    """

    def __init__(self) -> None:
        self._counts = [0.0] * _NUM_CLASSES
        self._total = 0.0
        self._weight = 1.0
        for delay_s, count in _ASSUMED:
            self._counts[_class_of(delay_s)] += count
            self._total += count

    def add(self, delay_s: float) -> None:
        """Records a delay in seconds; negative if the step took less than predicted."""
        self._counts[_class_of(delay_s)] += self._weight
        self._total += self._weight
        self._weight *= _FADE
        if self._weight > 1e6:
            self._counts = [count / self._weight for count in self._counts]
            self._total /= self._weight
            self._weight = 1.0

    def quantile_s(self, share: float) -> float:
        """Returns the delay in seconds, at least 0, that a share `share` of the steps do not exceed."""
        above = (1 - share) * self._total
        for place in range(_NUM_CLASSES - 1, 0, -1):
            above -= self._counts[place]
            if above < 0:
                return _LEAST_S * math.exp(_CLASS * place)
        return 0.0


def _class_of(delay_s: float) -> int:
    """Returns the delay's class; class n > 0 holds those up to _LEAST_S * exp(n * _CLASS)."""
    return math.ceil(math.log(min(_MOST_S, delay_s) / _LEAST_S) / _CLASS) if delay_s > _LEAST_S else 0
