"""What a start's seconds were spent on: one phase after another, from the start of the process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

from runner_svc.interface.progress import Progress

_IMPORTING = "importing"
_STARTED_FIELD = 19
"""Of /proc/self/stat, behind the process's name: its start, in clock ticks since the machine's."""


class StartTimes:
    """A clock of phases. The first is importing, which began with the process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, already_s: float | None = None) -> None:
        """`already_s`: seconds since the process began, by default as the system says."""
        self._clock = clock
        self._phase = _IMPORTING
        self._began_at = clock()
        self.seconds = {_IMPORTING: process_age_s() if already_s is None else already_s}
        """By phase."""

    def begin(self, phase: str) -> None:
        """Ends the current phase, unless it is this one; a phase may begin again."""
        now = self._clock()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._began_at
        self.seconds.setdefault(phase, 0.0)
        self._phase, self._began_at = phase, now

    def watching(self, progress: Progress) -> Progress:
        """Returns a progress callback whose operations are phases, too."""

        def report(phase: str, share: float) -> None:
            if phase != self._phase:
                self.begin(phase)
            progress(phase, share)

        return report

    def fields(self) -> dict[str, float]:
        """Returns the total and each phase that took 5 ms or more, in seconds, as fields of a log line."""
        self.begin(self._phase)
        fields = {"seconds": sum(self.seconds.values())}
        for phase, taken in self.seconds.items():
            fields[_field(phase)] = fields.get(_field(phase), 0.0) + taken
        return {name: round(taken, 2) for name, taken in fields.items() if name == "seconds" or round(taken, 2)}


def _field(phase: str) -> str:
    """Returns the name of a phase's field: its words before the name of a model or a file, which differs by start."""
    words = takewhile(str.isalpha, phase.lower().replace("'", "").split())
    return "_".join(words)


def process_age_s() -> float:
    """Returns the seconds since the process began; 0.0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTED_FIELD]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return max(0.0, age)
