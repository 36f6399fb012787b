"""Seconds that are left, and what of the cases they allow: a case that would come too late is left out, and said."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.gpu_comparison.loads import Case
from roster_client.bench.load.workload import Workload

LEAST_AFTER_S = 1.0
"""After the last arrival; with less, nothing would be learned of the last requests."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Ends at `end_s`, of the monotonic clock."""

    end_s: float

    @classmethod
    def of(cls, seconds: float) -> Budget:
        """From now."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Negative when it is over."""
        return self.end_s - time.monotonic()

    def without(self, seconds: float) -> Budget:
        """What remains when so much is kept back."""
        return Budget(self.end_s - seconds)

    def run_s(self, case: Case, workload: Workload, drain_s: float) -> float | None:
        """How long the case may run: `drain_s` past its last arrival, or less. None, and a line, when it can't."""
        arrivals_s = workload.requests[-1].scheduled_s
        left_s = self.left_s
        if left_s < arrivals_s + LEAST_AFTER_S:
            print(f"left out: {case.title}: {max(0.0, left_s):.0f} s are left, it takes {arrivals_s:.0f}", flush=True)
            return None
        return min(arrivals_s + drain_s, left_s)
