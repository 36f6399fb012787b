"""Arrival times for traces made by tests."""

from __future__ import annotations

import random

from scheduler_svc.simulator.trace import Trace, TraceRequest


def poisson(rng: random.Random, rate: float, start_s: float, end_at: float) -> list[float]:
    """Returns the times of a Poisson process of `rate` per second in [start_s, end_at)."""
    times, now_s = [], start_s + rng.expovariate(rate)
    while now_s < end_at:
        times.append(now_s)
        now_s += rng.expovariate(rate)
    return times


def merged(*requests: list[TraceRequest]) -> Trace:
    """Returns one trace of all requests, in order of arrival."""
    return Trace("test", tuple(sorted((r for group in requests for r in group), key=lambda r: r.arrival_s)))
