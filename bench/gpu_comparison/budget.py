"""Time budget of the comparison: a case that would start too late is skipped with a message."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.gpu_comparison.loads import Case
from roster_client.bench.load.workload import Workload

LEAST_AFTER_S = 1.0
"""Least seconds after the last arrival; with less, nothing would be learned about the last requests."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Budget that ends at `end_s` of the monotonic clock."""

    end_s: float

    @classmethod
    def of(cls, seconds: float) -> Budget:
        """Returns a budget of `seconds` from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Remaining seconds, negative if the budget is spent."""
        return self.end_s - time.monotonic()

    def without(self, seconds: float) -> Budget:
        """Returns the budget that remains if `seconds` are reserved."""
        return Budget(self.end_s - seconds)

    def run_s(self, case: Case, workload: Workload, drain_s: float) -> float | None:
        """Returns the duration, up to `drain_s` past the last arrival. Prints why and returns None if too late."""
        arrivals_s = workload.requests[-1].scheduled_s
        left_s = self.left_s
        if left_s < arrivals_s + LEAST_AFTER_S:
            print(
                f"left out: {case.title}: {max(0.0, left_s):.0f} s are left, but it takes {arrivals_s:.0f} s",
                flush=True,
            )
            return None
        return min(arrivals_s + drain_s, left_s)
