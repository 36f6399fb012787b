"""The simulation: every request gets its tokens, runs are repeatable, and the times are those of the cost model."""

from __future__ import annotations

import random

import numpy as np
import pytest

from roster_protos import admin_pb2
from scheduler_svc.policy import Budget, Load, Policy, PolicyParameters, UnknownPolicy
from scheduler_svc.simulator.outcome import Outcome
from scheduler_svc.simulator.simulation import Setup, SimulationStuck, simulate
from scheduler_svc.simulator.trace import Trace, TraceRequest
from tests.support.simulated_cost import round_cost
from tests.support.thoroughness import choice
from tests.support.thoroughness import count as how_many

NUM_REQUESTS = how_many(80, in_ci=40)
"""Requests of the slowest tests, fewer in CI."""


def random_trace(seed: int, count: int = 80, **fields: object) -> Trace:
    rng = random.Random(seed)
    arrivals = sorted(rng.uniform(0, 10) for _ in range(count))
    return Trace(
        f"random-{seed}",
        tuple(
            TraceRequest(arrival, rng.randint(1, 600), rng.randint(1, 60), tenant=rng.choice("ab"), **fields)  # type: ignore[arg-type]
            for arrival in arrivals
        ),
    )


POLICIES, DEPTHS = ("auto", "orca", "static"), (1, 2, 3)


@pytest.mark.parametrize(
    ("policy", "depth"),
    choice(
        [(policy, depth) for policy in POLICIES for depth in DEPTHS], in_ci=list(zip(POLICIES, DEPTHS, strict=True))
    ),
)
def test_every_request_gets_its_tokens(policy: str, depth: int) -> None:
    trace = random_trace(1, NUM_REQUESTS)
    outcome = simulate(trace, Setup(round_cost(), policy=policy, depth=depth, check=True))
    assert outcome.served.tolist() == list(range(NUM_REQUESTS))
    assert outcome.tokens.tolist() == [request.output_tokens for request in trace.requests]
    assert (outcome.first_token_s > outcome.arrival_s).all()
    assert (outcome.itl_s > 0).all()
    assert len(outcome.itl_s) == outcome.tokens.sum() - NUM_REQUESTS
    assert outcome.counters.policy_failures == 0


def test_the_same_twice() -> None:
    def times(seed: int) -> bytes:
        return simulate(
            random_trace(2, how_many(NUM_REQUESTS, in_ci=15)), Setup(round_cost(), spread=0.2, seed=seed)
        ).token_times_s.tobytes()

    first = times(1)
    assert first == times(1)
    assert first != times(2)


def test_progress_grows_and_an_observer_can_end_its_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.simulator.simulation.PROGRESS_S", 0.0)
    trace, setup = random_trace(2, NUM_REQUESTS), Setup(round_cost())
    shares: list[float] = []
    steps: list[int] = []

    def watch(report: admin_pb2.WatchStepsResponse) -> bool:
        steps.append(report.number)
        return len(steps) < 7

    outcome = simulate(trace, setup, watch, shares.append)
    assert shares == sorted(shares) and 0 < shares[0] < 0.5 < shares[-1] <= 1
    assert steps == list(range(1, 8))
    assert outcome.token_times_s.tobytes() == simulate(trace, setup).token_times_s.tobytes()


def test_times_are_those_of_the_cost_model() -> None:
    """One request alone: a prompt of 300 in chunks of 256 and 44, then 4 steps of one row."""
    cost = round_cost(sequence_s=0.001, link_s=0.0005, front_s=0.002)
    outcome = simulate(Trace("one", (TraceRequest(1.0, 300, 5),)), Setup(cost, scheduler_s=0.0, depth=2))
    chunks = (0.01 + 0.0256 + 0.001) + (0.01 + 0.0044 + 0.001)
    assert outcome.ttft_s[0] == pytest.approx(2 * 0.002 + 2 * 0.0005 + chunks)
    assert outcome.itl_s == pytest.approx([0.01 + 0.0001 + 0.001] * 4)


def test_one_plan_in_flight_waits_for_the_scheduler() -> None:
    """At depth 1, link and scheduler add to the time between two steps; at depth 2 they do not."""

    def itl(depth: int) -> float:
        cost = round_cost(link_s=0.001)
        trace = Trace("one", (TraceRequest(0.0, 10, 5),))
        return float(simulate(trace, Setup(cost, depth=depth, scheduler_s=0.003)).itl_s[1])

    assert itl(1) == pytest.approx(0.0101 + 2 * 0.001 + 0.003)
    assert itl(2) == pytest.approx(0.0101)


def test_preemption_is_counted_and_loses_nothing() -> None:
    trace = random_trace(3, count=60)
    outcome = simulate(trace, Setup(round_cost(), kv_tokens=1024, check=True))
    assert outcome.counters.preemptions > 0
    assert outcome.tokens.tolist() == [request.output_tokens for request in trace.requests]


def test_requests_that_end_before_their_max_tokens() -> None:
    trace = random_trace(4, max_tokens=100)
    outcome = simulate(trace, Setup(round_cost(), check=True))
    assert outcome.tokens.tolist() == [request.output_tokens for request in trace.requests]


def test_a_request_that_can_never_fit_is_refused() -> None:
    trace = Trace("two", (TraceRequest(0.0, 5000, 5), TraceRequest(0.0, 5, 5)))
    outcome = simulate(trace, Setup(round_cost()))
    assert outcome.served.tolist() == [1]
    assert "can never fit" in outcome.refusals[0]


def test_prefixes_are_shared_where_hash_ids_are_equal() -> None:
    prompts = [(1, 2, 3), (1, 2, 4), (1, 5, 3), (9, 2, 3)]
    trace = Trace(
        "prefixes", tuple(TraceRequest(float(i), 96, 2, ids) for i, ids in enumerate(prompts)), hash_block_tokens=32
    )
    assert simulate(trace, Setup(round_cost())).counters.cached_tokens == 0
    outcome = simulate(trace, Setup(round_cost(), prefix_sharing=True, check=True))
    assert outcome.counters.cached_tokens == 64 + 32
    ttft = outcome.ttft_s
    assert ttft[1] < ttft[2] < ttft[0] == pytest.approx(ttft[3])


def test_more_runners_serve_faster() -> None:
    trace = random_trace(5, count=120)
    one, four = (simulate(trace, Setup(round_cost(), runners=count)) for count in (1, 4))
    assert _mean_ttft(four) < _mean_ttft(one) / 3
    assert four.tokens.tolist() == one.tokens.tolist()


def test_a_slow_scheduler_slows_many_runners() -> None:
    """64 runners with steps of about 10 ms need 6,400 plans per second; at 1 ms per plan, the engine cannot keep up."""
    trace = Trace("burst", tuple(TraceRequest(0.0, 10, 50) for _ in range(64 * 8)))
    fast, slow = (simulate(trace, Setup(round_cost(), runners=64, scheduler_s=s)) for s in (1e-6, 1e-3))
    assert float(np.median(fast.itl_s)) == pytest.approx(0.0108, rel=0.05)
    assert float(np.median(slow.itl_s)) == pytest.approx(0.064, rel=0.1)


class _Lazy(Policy):
    """Admits no sequence."""

    name = "lazy"

    def budget(self, load: Load) -> Budget:
        return Budget(0, max_new=0)


def test_a_policy_that_admits_no_sequence_is_reported() -> None:
    with pytest.raises(SimulationStuck, match="80 sequences wait"):
        simulate(random_trace(6), Setup(round_cost(), policy=_Lazy(PolicyParameters())))


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(UnknownPolicy, match="fcfs"):
        simulate(random_trace(7), Setup(round_cost(), policy="nonsense"))


def test_tokens_of_a_tenant_over_time() -> None:
    outcome = simulate(random_trace(8), Setup(round_cost()))
    end_at = float(outcome.last_token_at.max())
    assert outcome.tokens_by("a", end_at) + outcome.tokens_by("b", end_at) == outcome.tokens.sum()
    assert outcome.tokens_by("a", 0.0) == 0


def _mean_ttft(outcome: Outcome) -> float:
    return float(outcome.ttft_s.mean())
