"""Measures how long the backend has computed one plan, in time during which this process ran: a pause is not a hang.

After a pause (SIGSTOP, a paused VM), minutes may have passed since the current plan began. Ticks of a tenth of a second
are therefore counted instead, and a gap of any length counts as one tick.
"""

from __future__ import annotations

TICK_S = 0.1


class BusyWatch:
    """Watchdog for one plan at a time. The socket's loop calls `look` in each iteration, at least once per tick."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s` is the time limit of one plan, in seconds."""
        self._limit_s = limit_s
        self._began_at: float | None = None
        self._looked_at = 0.0
        self._busy_s = 0.0

    def look(self, began_at: float | None, now: float) -> None:
        """Adds the time since the last call, at most one tick.

        `began_at` is the time (`time.monotonic`) at which the oldest plan began to compute; None if no plan computes.
        """
        if began_at is None or began_at != self._began_at:
            self._began_at, self._busy_s, self._looked_at = began_at, 0.0, now if began_at is None else began_at
        self._busy_s += min(TICK_S, now - self._looked_at)
        self._looked_at = now

    @property
    def over(self) -> bool:
        """Whether the plan has exceeded the limit."""
        return self._busy_s > self._limit_s
