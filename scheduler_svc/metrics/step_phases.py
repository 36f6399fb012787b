"""Where the engine's thread spends its time, by phase of its loop."""

from __future__ import annotations

import time
from enum import IntEnum


class StepPhase(IntEnum):
    """A part of the engine's loop."""

    SCHEDULE = 0
    """Receiving, applying results, admitting requests and planning."""
    SEND = 1
    PUBLISH = 2
    """Handing tokens and ends to the front workers; measuring."""
    WAIT = 3
    """Nothing to do until a message comes."""


class StepPhases:
    """A stopwatch that runs through all phases: each ends where the next begins."""

    def __init__(self) -> None:
        self._seconds = [0.0] * len(StepPhase)
        self._since_at = time.perf_counter()

    def end(self, phase: StepPhase) -> None:
        """All since the last call was this phase."""
        now_s = time.perf_counter()
        self._seconds[phase] += now_s - self._since_at
        self._since_at = now_s

    def seconds(self) -> dict[StepPhase, float]:
        """Seconds in each phase so far."""
        return {phase: self._seconds[phase] for phase in StepPhase}
