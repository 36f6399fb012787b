"""A histogram with fixed buckets that counts many values at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
"""Ranges from a cached prompt on an idle GPU to a long wait in the queue."""
ITL_BUCKETS_S = (0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
"""Fine around usual targets (5 to 100 ms); the other buckets show stalls."""
E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 90, 120, 240, 480, 960)
STEP_BUCKETS_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
POSITION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Of the last four: from the shortest answer to long ones, from a small model's step to a CPU's, and powers of two up
to the sizes of large runners."""


@dataclass(slots=True, frozen=True)
class HistogramState:
    """Copy of a histogram's counts."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Values up to each bound and above the previous one; the last count: above all bounds."""
    total: float
    """Sum of all values."""


class Histogram:
    """Counts values by bucket; upper bounds are inclusive, as in Prometheus."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds` must ascend; values above the last one are counted too."""
        self._bounds = bounds
        self._edges = np.array(bounds, np.float64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total = 0.0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Counts all values. No value may be NaN."""
        places = self._edges.searchsorted(values)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._total += float(values.sum())

    def state(self) -> HistogramState:
        """Returns a copy; later values don't change it."""
        return HistogramState(self._bounds, tuple(self._counts.tolist()), self._total)
