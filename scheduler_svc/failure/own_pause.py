"""The scheduler itself was stopped (SIGSTOP, a paused VM): what it waits for could not come meanwhile.

The link forgives its runners by itself, and front workers count answers instead of seconds. Deadlines of requests are
promises to clients, and stand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler_svc.engine import Engine


def forgive(engine: Engine, pause_s: float) -> None:
    """Puts off by `pause_s` seconds: the end of waiting for a runner, for clients to attach, and the age of plans."""
    engine.attendance.forgive(pause_s)
    for request in engine.book.live():
        if request.gone_until_s is not None:
            request.gone_until_s += pause_s
            engine.book.remind(request.gone_until_s, request)
    for scheduler in engine.pool.schedulers.values():
        for flight in scheduler.in_flight:
            flight.sent_s += pause_s
