"""A retry promise: the time after which a refused request is accepted if its client sends it again."""

from __future__ import annotations

from dataclasses import dataclass

KEPT_S = 10.0
"""Seconds for which a promise is kept after its due time."""
ROUNDING_S = 0.001
"""Tolerance for retry times, which clients receive in whole milliseconds."""
SAME_TIMEOUT = 0.95
"""Fraction of the first timeout that a repeated request must have: the deadline of a call varies between attempts."""


@dataclass(slots=True, frozen=True)
class Promise:
    """The promise to one client. Times in seconds of the engine's clock."""

    place_at: float
    """The arrival time by which the request is ranked when it comes back."""
    due_at: float
    timeout_s: float
    """Seconds from the arrival of the refused request to its deadline."""
    work_s: float
    """Slot-seconds of its choices, divided by the number of slots."""

    def is_due(self, now_s: float) -> bool:
        """Whether the promised time has come."""
        return now_s >= self.due_at - ROUNDING_S

    def is_over(self, now_s: float) -> bool:
        """Whether the promise has expired unclaimed."""
        return now_s > self.due_at + KEPT_S

    def suits(self, timeout_s: float) -> bool:
        """Whether a request with this timeout has about as much time as the refused one, or more."""
        return timeout_s >= SAME_TIMEOUT * self.timeout_s

    def holds_for_more_than(self, other: Promise, now_s: float) -> bool:
        """Whether the promise is open and the other's request has clearly less time."""
        return not self.is_over(now_s) and not self.suits(other.timeout_s)
