"""What a refused client was told: from when on the same request is taken."""

from __future__ import annotations

from dataclasses import dataclass

KEPT_S = 10.0
"""A promise is kept for so long after its time."""
ROUNDING_S = 0.001
"""Clients are told whole milliseconds."""
SAME_TIMEOUT = 0.95
"""The same request has this part of the time that it had at least: a call's own deadline is never twice the same."""


@dataclass(slots=True, frozen=True)
class Promise:
    """What one client was told. Times in seconds of the engine's clock."""

    place_at: float
    """The arrival by which the request is ranked when it comes back."""
    due_at: float
    timeout_s: float
    """From the arrival of the request that was refused to its deadline."""
    work_s: float
    """Slot-seconds of its choices, over the number of slots."""

    def is_due(self, now_s: float) -> bool:
        """It has come to the time that was told."""
        return now_s >= self.due_at - ROUNDING_S

    def is_over(self, now_s: float) -> bool:
        """Nobody has come for it."""
        return now_s > self.due_at + KEPT_S

    def suits(self, timeout_s: float) -> bool:
        """A request of so many seconds has about as much time as the one that was refused, or more."""
        return timeout_s >= SAME_TIMEOUT * self.timeout_s

    def holds_for_more_than(self, other: Promise, now_s: float) -> bool:
        """It is open, and the other's request has clearly less time."""
        return not self.is_over(now_s) and not self.suits(other.timeout_s)
