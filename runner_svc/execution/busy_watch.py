"""How long the backend has been at one plan, in time that this process ran: a pause is not a hang.

A process that was stopped (SIGSTOP, a paused VM) finds minutes gone since the plan that it was at began. So ticks of a
tenth of a second are counted instead, and a gap, however long, counts as one.
"""

from __future__ import annotations

TICK_S = 0.1


class BusyWatch:
    """Looked at in each turn of the socket's loop, which takes a tick at most while it runs."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: seconds that one plan may take."""
        self._limit_s = limit_s
        self._began_at: float | None = None
        self._looked_at = 0.0
        self._busy_s = 0.0

    def look(self, began_at: float | None, now: float) -> None:
        """`began_at`: when (`time.monotonic`) the oldest plan began to compute, as at every look; None: none does."""
        if began_at is None or began_at != self._began_at:
            self._began_at, self._busy_s, self._looked_at = began_at, 0.0, now if began_at is None else began_at
        self._busy_s += min(TICK_S, now - self._looked_at)
        self._looked_at = now

    @property
    def over(self) -> bool:
        """The plan has taken longer than it may."""
        return self._busy_s > self._limit_s
