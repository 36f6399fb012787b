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
        self._since_s: float | None = None
        self._looked_s = 0.0
        self._busy_s = 0.0

    def look(self, since_s: float | None, now_s: float) -> None:
        """`since_s`: since when (`time.monotonic`) the oldest plan computes, as at every look; None: none does."""
        if since_s is None or since_s != self._since_s:
            self._since_s, self._busy_s, self._looked_s = since_s, 0.0, now_s if since_s is None else since_s
        self._busy_s += min(TICK_S, now_s - self._looked_s)
        self._looked_s = now_s

    @property
    def over(self) -> bool:
        """The plan has taken longer than it may."""
        return self._busy_s > self._limit_s
