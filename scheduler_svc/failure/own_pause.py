"""The scheduler itself was stopped (SIGSTOP, a paused VM): what it waits for could not come meanwhile.

The link forgives its runners by itself, and front workers count answers instead of seconds. Deadlines of requests are
promises to clients, and stand.
"""

from __future__ import annotations

from scheduler_svc.failure.runner_lifecycle import RunnerLifecycle
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.runner_pool import RunnerPool


def forgive(lifecycle: RunnerLifecycle, requests: Requests, pool: RunnerPool, pause_s: float) -> None:
    """Puts off by `pause_s` seconds: the end of waiting for a runner, for clients to attach, and the age of plans."""
    lifecycle.forgive(pause_s)
    for request in requests.book.live():
        if request.gone_until_at is not None:
            request.gone_until_at += pause_s
            requests.book.remind(request.gone_until_at, request)
    for scheduler in pool.schedulers.values():
        for flight in scheduler.in_flight:
            flight.sent_at += pause_s
