"""`fair` on the simulator: the bound of Sheng et al. between tenants of 10:1 load, weights, newcomers, policy swaps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler_svc.policies.fair import Fair, FairParameters
from scheduler_svc.policy import UnknownPolicy, load_policy
from scheduler_svc.simulator.outcome import Outcome
from scheduler_svc.simulator.simulation import Setup, Simulation, simulate
from scheduler_svc.simulator.trace import Trace, TraceRequest
from tests.support.arrivals import merged, poisson
from tests.support.simulated_cost import round_cost

COST = round_cost()
LONGEST_PROMPT = 400
BOUND = 2 * max(1.0 * LONGEST_PROMPT, 2.0 * COST.runner.kv_tokens)
"""Theorem 4.4 of the paper, with input weight 1 and output weight 2."""


def requests(rng: random.Random, tenant: str, rate: float, start_s: float, end_at: float) -> list[TraceRequest]:
    return [
        TraceRequest(t, rng.randint(20, LONGEST_PROMPT), rng.randint(5, 60), tenant=tenant)
        for t in poisson(rng, rate, start_s, end_at)
    ]


def run(trace: Trace, policy: str = "fair", **parameters: object) -> Outcome:
    outcome = simulate(trace, Setup(COST, policy=policy, parameters=parameters))
    assert outcome.counters.policy_failures == 0
    return outcome


def service(outcome: Outcome, tenant: str, until_at: float) -> float:
    """Returns the tenant's prompt tokens + 2 x output tokens by then; a prompt counts with its first token."""
    mine = np.array([name == tenant for name in outcome.tenants])
    prompts = np.array([outcome.trace.requests[i].prompt_tokens for i in outcome.served.tolist()])
    begun = mine & (outcome.first_token_s <= until_at)
    return float(prompts[begun].sum()) + 2 * outcome.tokens_by(tenant, until_at)


def largest_gap(outcome: Outcome, seconds: tuple[float, float], weights: tuple[float, float] = (1, 1)) -> float:
    """Returns the largest difference of weighted service of a and b, from the interval's start to any time in it."""
    times = np.linspace(*seconds, 60)
    a, b = (
        np.array([service(outcome, tenant, t) / weight for t in times])
        for tenant, weight in zip("ab", weights, strict=True)
    )
    return float(np.abs((a - a[0]) - (b - b[0])).max())


def test_two_tenants_of_ten_to_one_load_are_served_alike_while_both_wait() -> None:
    """Both tenants ask for more than half of the runner."""
    rng = random.Random(1)
    trace = merged(requests(rng, "a", 120, 0, 4), requests(rng, "b", 12, 0, 4))
    fair, fcfs = run(trace), run(trace, "fcfs")
    gap, unfair_gap = largest_gap(fair, (1, 4)), largest_gap(fcfs, (1, 4))
    print(f"bound {BOUND}, fair {gap}, fcfs {unfair_gap}")
    assert gap <= BOUND
    assert gap < 0.1 * BOUND, "in practice far below"
    assert unfair_gap > 5 * gap


def test_a_heavy_tenant_does_not_slow_a_light_one() -> None:
    """Tenant b asks for less than its half and is served as if a were absent, except for the slots that a occupies."""
    rng = random.Random(2)
    heavy, light = requests(rng, "a", 60, 0, 6), requests(rng, "b", 2, 0, 6)
    alone = run(merged(light)).ttft_s.mean()
    mine = {policy: run(merged(heavy, light), policy) for policy in ("fair", "fcfs")}
    ttft_s = {
        policy: outcome.ttft_s[np.array([tenant == "b" for tenant in outcome.tenants])].mean()
        for policy, outcome in mine.items()
    }
    print(alone, ttft_s)
    assert ttft_s["fair"] < alone + 1.0
    assert ttft_s["fcfs"] > 5 * ttft_s["fair"]


def test_weights() -> None:
    rng = random.Random(3)
    trace = merged(requests(rng, "a", 40, 0, 9), requests(rng, "b", 40, 0, 9))
    outcome = run(trace, weights={"a": 3.0})
    assert largest_gap(outcome, (1, 9), weights=(3, 1)) <= BOUND
    a, b = (service(outcome, tenant, 9) - service(outcome, tenant, 1) for tenant in "ab")
    assert a / b == pytest.approx(3, rel=0.1)
    with pytest.raises(ValueError, match="weights of 'a' must be numbers above 0"):
        load_policy("fair", {"weights": {"a": 0}})


def test_idle_time_earns_a_tenant_no_credit() -> None:
    """Tenant b arrives after 4 s of a alone. From then on each gets half; a is not blocked until b has caught up."""
    rng = random.Random(4)
    trace = merged(requests(rng, "a", 40, 0, 9), requests(rng, "b", 60, 4, 9))
    outcome = run(trace)
    assert largest_gap(outcome, (4.5, 9)) <= BOUND
    a, b = (service(outcome, tenant, 9) - service(outcome, tenant, 4.5) for tenant in "ab")
    assert a / b == pytest.approx(1, rel=0.15)


def test_counters_survive_swaps() -> None:
    """Under `fcfs`, b gets little; under `fair` again it catches up, and in the end both have received the same."""
    rng = random.Random(5)
    trace = merged(requests(rng, "a", 60, 0, 12), requests(rng, "b", 16, 0, 12))
    simulation = Simulation(trace, Setup(COST, policy="fair"))
    engine = simulation.engine
    swaps = [(4.0, "fcfs"), (6.0, "fair")]
    simulation.turn()
    gaps: dict[float, float] = {}
    while simulation.clock.now_s < 12:
        simulation._advance()
        simulation.turn()
        if swaps and simulation.clock.now_s >= swaps[0][0]:
            at_s, name = swaps.pop(0)
            accounts = [engine.ledger.account(tenant) for tenant in "ab"]
            engine.change_policy(load_policy(name, {}))
            assert [engine.ledger.account(tenant) for tenant in "ab"] == accounts
            a, b = (account.prompt_tokens + 2 * account.sampled_tokens + account.lift for account in accounts)
            gaps[at_s] = a - b
    a, b = (Fair(FairParameters()).tenant_key(tenant, engine.ledger) for tenant in "ab")
    print(gaps, a - b)
    assert gaps[6.0] > 4 * abs(gaps[4.0]), "fcfs served a"
    assert abs(a - b) < 0.3 * gaps[6.0], "made up for"
    outcome = simulation.run()
    assert outcome.tokens.tolist() == [request.output_tokens for request in trace.requests]


def test_a_thousand_tenants() -> None:
    rng = random.Random(6)
    trace = merged([TraceRequest(0.0, 16, 4, tenant=str(i % 1000)) for i in range(1500)])
    outcome = run(merged(list(trace.requests), requests(rng, "late", 20, 0, 1)))
    order = np.argsort(outcome.first_token_s, kind="stable")
    first_half = {outcome.tenants[i] for i in order[:1000].tolist()}
    assert len(first_half) > 950, "everybody's first request goes before anybody's second"


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises((UnknownPolicy, ValueError), match=r"It knows: .*weights, input_weight, output_weight"):
        load_policy("fair", {"weight": {}})
