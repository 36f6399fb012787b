"""Extends timeouts after a pause of the scheduler process itself (SIGSTOP, a paused VM), when nothing could arrive.

The runner link does so by itself, and front workers count answers instead of seconds. Request deadlines are not
extended, because they are promises to clients.
"""

from __future__ import annotations

from scheduler_svc.failure.runner_lifecycle import RunnerLifecycle
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.runner_pool import RunnerPool


def forgive(lifecycle: RunnerLifecycle, requests: Requests, pool: RunnerPool, pause_s: float) -> None:
    """Extends the waits for a runner and for clients to attach by `pause_s`, and makes plans that much younger."""
    lifecycle.forgive(pause_s)
    for request in requests.book.live():
        if request.gone_until_at is not None:
            request.gone_until_at += pause_s
            requests.book.remind(request.gone_until_at, request)
    for scheduler in pool.schedulers.values():
        for flight in scheduler.in_flight:
            flight.sent_at += pause_s
