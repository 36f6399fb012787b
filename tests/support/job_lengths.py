"""Jobs of very different lengths, and a simulation of policies on them."""

from __future__ import annotations

import random
from typing import Any

from scheduler_svc.simulator.outcome import Outcome
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import Trace, TraceRequest
from tests.support.arrivals import merged, poisson
from tests.support.simulated_cost import round_cost


def heavy_tail(seed: int, **fields: Any) -> Trace:
    """Returns a trace of lognormal outputs (median 12, some of hundreds) slightly above the runner's capacity."""
    rng = random.Random(seed)
    return merged(
        [
            TraceRequest(t, rng.randint(10, 100), min(600, max(1, int(rng.lognormvariate(2.5, 1.2)))), **fields)
            for t in poisson(rng, 28, 0, 20)
        ]
    )


def run(trace: Trace, policy: str, **parameters: object) -> Outcome:
    outcome = simulate(trace, Setup(round_cost(), policy=policy, parameters=parameters))
    assert outcome.counters.policy_failures == 0
    return outcome
