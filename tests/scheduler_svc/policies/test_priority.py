"""`priority` on the simulator: strict within the ageing bound, no starvation beyond it, slots go to higher classes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler_svc.simulator.outcome import Outcome
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import TraceRequest
from tests.support.arrivals import merged, poisson
from tests.support.simulated_cost import round_cost
from tests.support.thoroughness import choice

AGEING_S = 4.0


def flood(seed: int, preempting: bool) -> Outcome:
    """Twice the runner's capacity in classes 0 to 2, with equal prompts: first tokens arrive in order of admission."""
    rng = random.Random(seed)
    trace = merged([TraceRequest(t, 64, 16, priority=rng.choice((0, 1, 2))) for t in poisson(rng, 50, 0, 20)])
    parameters = {"ageing_s": AGEING_S, "preempt": preempting}
    outcome = simulate(trace, Setup(round_cost(), policy="priority", parameters=parameters))
    assert outcome.counters.policy_failures == 0
    return outcome


def test_no_request_is_overtaken_by_one_beyond_the_bound() -> None:
    outcome = flood(1, preempting=False)
    priority = np.array([request.priority for request in outcome.trace.requests])
    arrival, first = outcome.arrival_s, outcome.first_token_s
    overtaken_late = ordered = 0
    for i in range(len(arrival)):
        bound = np.maximum(0, priority - priority[i]) * AGEING_S
        later = arrival > arrival[i] + bound + 0.1  # one turn of the engine may admit both
        assert (first[later] >= first[i]).all(), i
        higher = (priority > priority[i]) & (arrival > arrival[i]) & ~later
        overtaken_late += int((first[higher] < first[i]).sum())
        ordered += int(later.sum())
    assert overtaken_late > 1000 and ordered > 1000, "both happen"
    waits = [float(outcome.ttft_s[priority == level].mean()) for level in (0, 1, 2)]
    assert waits[0] > waits[1] > waits[2]


@pytest.mark.parametrize("victim", ["lowest_rank", "least_computed"])
def test_a_higher_class_takes_a_slot_at_once(victim: str) -> None:
    """Eight long requests of class 0 occupy all slots when one of class 1 arrives."""
    low = [TraceRequest(0.1 * i, 100, 300) for i in range(8)]
    trace = merged(low, [TraceRequest(2.0, 100, 10, priority=1)])

    def ttft_s(**parameters: object) -> tuple[float, Outcome]:
        outcome = simulate(trace, Setup(round_cost(), policy="priority", parameters=parameters, check=True))
        assert outcome.counters.policy_failures == 0
        return float(outcome.ttft_s[8]), outcome

    with_slot, outcome = ttft_s(victim=victim)
    assert with_slot < 0.2
    assert outcome.counters.preemptions == 1
    assert outcome.tokens.tolist() == [300] * 8 + [10]
    without, outcome = ttft_s(preempt=False)
    assert without > 1
    assert outcome.counters.preemptions == 0


def test_the_same_class_is_not_preempted() -> None:
    trace = merged([TraceRequest(0.1 * i, 100, 100, priority=3) for i in range(20)])
    outcome = simulate(trace, Setup(round_cost(), policy="priority", check=True))
    assert outcome.counters.preemptions == 0
    assert (np.diff(outcome.first_token_s) >= 0).all()


def test_blocks_are_taken_too() -> None:
    """Slots are free, but two long contexts fill the KV cache: only as many are preempted as needed."""
    low = [TraceRequest(0.0, 1800, 200), TraceRequest(0.2, 1700, 200)]
    trace = merged(low, [TraceRequest(1.5, 1000, 5, priority=1)])
    outcome = simulate(trace, Setup(round_cost(), policy="priority", check=True))
    assert outcome.ttft_s[2] < 0.7
    assert outcome.counters.preemptions == 1
    assert outcome.tokens.tolist() == [200, 200, 5]


def test_a_candidate_that_never_fits_preempts_no_sequence() -> None:
    """The candidate needs more than all lower sequences would free, so none is preempted in vain."""
    running = [TraceRequest(0.0, 2400, 200, priority=2), TraceRequest(0.1, 600, 200)]
    trace = merged(running, [TraceRequest(1.5, 2000, 5, priority=1)])
    outcome = simulate(trace, Setup(round_cost(), policy="priority", check=True))
    assert outcome.counters.preemptions == 0
    assert outcome.tokens.tolist() == [200, 200, 5]


@pytest.mark.parametrize("policy", choice(["fcfs", "sjf"], in_ci=["fcfs"]))
def test_preempting_the_least_computed_recomputes_less(policy: str) -> None:
    rng = random.Random(7)
    trace = merged([TraceRequest(t, rng.randint(50, 900), rng.randint(50, 250)) for t in poisson(rng, 3, 0, 18)])

    def computed(victim: str) -> tuple[int, int]:
        setup = Setup(round_cost(), policy=policy, parameters={"victim": victim}, kv_tokens=3000)
        outcome = simulate(trace, setup)
        assert outcome.tokens.tolist() == [request.output_tokens for request in trace.requests]
        return outcome.counters.step_tokens, outcome.counters.preemptions

    lowest, least = computed("lowest_rank"), computed("least_computed")
    print(policy, lowest, least)
    assert lowest[1] > 3 and least[1] > 3
    assert least[0] < lowest[0]
