"""`prefix` on the simulator: more is served from a small cache than under `fcfs`, and cold requests do not starve."""

from __future__ import annotations

import random

import numpy as np

from scheduler_svc.policies.prefix import Prefix, PrefixParameters
from scheduler_svc.policy import RequestView, WaitingView
from scheduler_svc.simulator.outcome import Outcome
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import Trace, TraceRequest
from tests.support.arrivals import merged, poisson
from tests.support.simulated_cost import round_cost


def families(seed: int) -> Trace:
    """Twelve families of prompts, each with a prefix of 512 tokens; the cache holds about seven of them."""
    rng = random.Random(seed)
    requests = []
    for number, t in enumerate(poisson(rng, 30, 0, 15)):
        family = rng.randrange(12)
        requests.append(TraceRequest(t, 512 + rng.randint(1, 100), 8, prefix_hash_ids=(family, 1000 + number)))
    return merged(requests)


def run(trace: Trace, policy: str, **parameters: object) -> Outcome:
    setup = Setup(round_cost(), policy=policy, parameters=parameters, prefix_sharing=True, slots=4)
    outcome = simulate(trace, setup)
    assert outcome.counters.policy_failures == 0
    return outcome


def test_more_of_the_prompts_comes_from_the_cache() -> None:
    trace = families(1)
    fcfs, prefix = run(trace, "fcfs"), run(trace, "prefix", max_wait_s=60)
    print(fcfs.counters.cached_tokens, prefix.counters.cached_tokens, fcfs.e2e_s.mean(), prefix.e2e_s.mean())
    assert prefix.counters.cached_tokens > 1.3 * fcfs.counters.cached_tokens
    assert prefix.e2e_s.mean() < 0.9 * fcfs.e2e_s.mean()


def test_a_cold_request_is_passed_over_for_its_bound_at_most() -> None:
    """Requests of one hot prefix keep arriving as fast as they can be served; a cold one is among them."""
    rng = random.Random(2)
    hot = [
        TraceRequest(t, 520, 16, prefix_hash_ids=(1, 10_000 + number))
        for number, t in enumerate(poisson(rng, 30, 0, 9))
    ]
    trace = merged(hot, [TraceRequest(3.0, 600, 16, prefix_hash_ids=(2, 3))])
    cold = next(i for i, request in enumerate(trace.requests) if request.prompt_tokens == 600)

    def overtaken_by(max_wait_s: float) -> float:
        """Returns the latest arrival of a hot request served before the cold one, in seconds after the cold one's."""
        outcome = run(trace, "prefix", max_wait_s=max_wait_s, window=32)
        before = outcome.first_token_s < outcome.first_token_s[cold]
        return float((outcome.arrival_s[before] - outcome.arrival_s[cold]).max())

    bounds = [overtaken_by(max_wait_s) for max_wait_s in (0.0, 2.0, 100.0)]
    print(bounds)
    assert bounds[0] < 0.2, "first come, first served"
    assert bounds[1] <= 2.0
    assert bounds[2] > 2.5, "what it is protected from"


def waiting(number: int, cached: int, waited_s: float) -> WaitingView:
    request = RequestView(str(number), "", 0.0, 0, 100, 10, 1)
    return WaitingView(number, request, ((float(number),), number), 100, cached, waited_s)


def test_order_of_the_head() -> None:
    policy = Prefix(PrefixParameters(max_wait_s=5, window=8))
    assert policy.rerank_window == 8
    head = [waiting(1, 0, 6.0), waiting(2, 16, 5.0), waiting(3, 0, 4.0), waiting(4, 64, 3.0), waiting(5, 64, 2.0)]
    assert [view.sequence_id for view in policy.rerank(head)] == [1, 2, 4, 5, 3]


def test_without_sharing_it_is_first_come_first_served() -> None:
    rng = random.Random(3)
    trace = merged([TraceRequest(t, rng.randint(10, 300), 8) for t in poisson(rng, 40, 0, 5)])
    outcome = simulate(trace, Setup(round_cost(), policy="prefix"))
    assert (np.diff(outcome.first_token_s) >= 0).all()
