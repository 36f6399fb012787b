"""The time of a simulation: seconds since its start, moved by hand."""

from __future__ import annotations


class VirtualClock:
    """Callable like `time.monotonic`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Seconds since the start of the simulation."""
        return self.now_s
