"""`sjf` on the simulator: shorter mean times on heavy-tailed lengths."""

from __future__ import annotations

import random

import numpy as np

from scheduler_svc.simulator.trace import TraceRequest
from tests.support.arrivals import merged, poisson
from tests.support.job_lengths import heavy_tail, run


def test_mean_time_to_the_last_token_is_shorter() -> None:
    trace = heavy_tail(1)
    fcfs, sjf = run(trace, "fcfs"), run(trace, "sjf")
    print(fcfs.e2e_s.mean(), sjf.e2e_s.mean(), np.median(fcfs.e2e_s), np.median(sjf.e2e_s))
    assert sjf.e2e_s.mean() < 0.7 * fcfs.e2e_s.mean()
    assert np.median(sjf.e2e_s) < 0.5 * np.median(fcfs.e2e_s)


def test_tenant_history_beats_a_limit_that_says_nothing() -> None:
    """All requests set max_tokens to 600; tenants differ in the lengths of their outputs."""
    rng = random.Random(3)
    trace = merged(
        [TraceRequest(t, 40, rng.randint(3, 9), tenant="brief", max_tokens=600) for t in poisson(rng, 40, 0, 7)],
        [TraceRequest(t, 40, rng.randint(80, 160), tenant="long", max_tokens=600) for t in poisson(rng, 8, 0, 7)],
    )
    limit, history = run(trace, "sjf", estimator="max_tokens"), run(trace, "sjf", estimator="tenant_history")
    print(limit.e2e_s.mean(), history.e2e_s.mean())
    assert history.e2e_s.mean() < 0.7 * limit.e2e_s.mean()
