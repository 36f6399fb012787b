"""`static` against `fcfs` on the simulator: the cost of request-level batching by workload (docs/policies.md)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler_svc.simulator.cost_model import load_cost_model
from scheduler_svc.simulator.outcome import Outcome
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import Trace, TraceRequest
from tests.support.arrivals import poisson

COST = load_cost_model("h200-llama-3.1-8b")


def run(trace: Trace, policy: str, slots: int) -> Outcome:
    return simulate(trace, Setup(COST, policy=policy, slots=slots))


def heavy_tailed(count: int, seed: int) -> list[int]:
    """Output lengths: lognormal, median 33, at most 1,024."""
    rng = random.Random(seed)
    return [min(1024, max(1, int(rng.lognormvariate(3.5, 1.2)))) for _ in range(count)]


def test_heavy_tailed_outputs_take_static_batches_several_times_as_long() -> None:
    """All requests arrive at the start, so the ratio is that of the throughputs."""
    lengths = heavy_tailed(256, 1)
    trace = Trace("heavy", tuple(TraceRequest(0.0, 64, length) for length in lengths))
    static, fcfs = run(trace, "static", 32), run(trace, "fcfs", 32)
    print(static.last_token_at.max() / fcfs.last_token_at.max())
    assert static.last_token_at.max() > 2.5 * fcfs.last_token_at.max()


def test_outputs_of_one_length_cost_nothing() -> None:
    trace = Trace("equal", tuple(TraceRequest(0.0, 64, 64) for _ in range(256)))
    static, fcfs = run(trace, "static", 32), run(trace, "fcfs", 32)
    assert static.last_token_at.max() == pytest.approx(fcfs.last_token_at.max(), rel=0.05)


def test_at_equal_latency_the_gap_is_far_larger() -> None:
    """At ten times the rate at which static batches become slow, batches that sequences join at any step do not."""
    rng = random.Random(2)
    lengths = heavy_tailed(200, 3)

    def normalized_latency(policy: str, rate: float) -> float:
        arrivals = poisson(rng, rate, 0, 200 / rate)
        requests = zip(arrivals, lengths, strict=False)
        outcome = run(Trace("poisson", tuple(TraceRequest(t, 64, length) for t, length in requests)), policy, 32)
        return float(np.median(outcome.e2e_s / outcome.tokens))

    assert normalized_latency("static", 6.0) > 2 * normalized_latency("fcfs", 60.0)
