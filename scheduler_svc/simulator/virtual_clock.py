"""Clock of a simulation."""

from __future__ import annotations


class VirtualClock:
    """A clock that is called like `time.monotonic` and advanced by setting `now_s`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Returns the seconds since the start of the simulation."""
        return self.now_s
