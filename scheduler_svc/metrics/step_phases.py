"""Time that the engine's thread spends in each phase of its loop."""

from __future__ import annotations

import time
from enum import IntEnum


class StepPhase(IntEnum):
    """A phase of the engine's loop."""

    SCHEDULE = 0
    """Receiving, applying results, admitting requests and planning."""
    SEND = 1
    PUBLISH = 2
    """Sending tokens and ends to the front workers; measuring."""
    WAIT = 3
    """Waiting for a message."""


class StepPhases:
    """A stopwatch that is always running: each phase ends where the next begins."""

    def __init__(self) -> None:
        self._seconds = [0.0] * len(StepPhase)
        self.poll_s = 0.0
        """Seconds of WAIT in which the thread polled instead of sleeping."""
        self._since_at = time.perf_counter()

    def end(self, phase: StepPhase) -> None:
        """Assigns the time since the last call to this phase."""
        now_s = time.perf_counter()
        self._seconds[phase] += now_s - self._since_at
        self._since_at = now_s

    def seconds(self) -> dict[StepPhase, float]:
        """Returns the seconds spent in each phase so far."""
        return {phase: self._seconds[phase] for phase in StepPhase}
