"""`sjf` on the simulator: shorter mean times on heavy-tailed lengths, nobody starves beyond the ageing bound."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from scheduler_svc.policies import length_estimators
from scheduler_svc.policies.length_estimators import MaxTokens, TenantHistory
from scheduler_svc.policies.sjf import Sjf
from scheduler_svc.policy import RequestView, WrongParameters, load_policy
from scheduler_svc.simulator.outcome import Outcome
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import Trace, TraceRequest
from tests.support.arrivals import merged, poisson
from tests.support.simulated_cost import round_cost


def heavy_tail(seed: int, **fields: Any) -> Trace:
    """Lognormal outputs (median 12, some of hundreds), somewhat more than the runner can do while they arrive."""
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


def test_mean_time_to_the_last_token_is_shorter() -> None:
    trace = heavy_tail(1)
    fcfs, sjf = run(trace, "fcfs"), run(trace, "sjf")
    print(fcfs.e2e_s.mean(), sjf.e2e_s.mean(), np.median(fcfs.e2e_s), np.median(sjf.e2e_s))
    assert sjf.e2e_s.mean() < 0.7 * fcfs.e2e_s.mean()
    assert np.median(sjf.e2e_s) < 0.5 * np.median(fcfs.e2e_s)


def test_nobody_is_overtaken_by_what_came_later_than_the_bound() -> None:
    ageing_s = 2.0
    outcome = run(heavy_tail(2), "sjf", ageing_s=ageing_s)
    overtaken = 0
    for i in range(len(outcome.arrival_s)):
        later = outcome.arrival_s > outcome.arrival_s[i] + ageing_s
        # prompts differ, so a seat taken a step earlier may still mean a first token a step later
        assert (outcome.first_token_s[later] >= outcome.first_token_s[i] - 0.1).all(), i
        overtaken += int(
            (outcome.first_token_s[outcome.arrival_s > outcome.arrival_s[i]] < outcome.first_token_s[i]).sum()
        )
    assert overtaken > 100, "within the bound they are"


def test_tenant_history_beats_a_limit_that_says_nothing() -> None:
    """Everybody asks for at most 600 tokens; tenants differ in what they really take."""
    rng = random.Random(3)
    trace = merged(
        [TraceRequest(t, 40, rng.randint(3, 9), tenant="brief", max_tokens=600) for t in poisson(rng, 40, 0, 12)],
        [TraceRequest(t, 40, rng.randint(80, 160), tenant="long", max_tokens=600) for t in poisson(rng, 8, 0, 12)],
    )
    limit, history = run(trace, "sjf", estimator="max_tokens"), run(trace, "sjf", estimator="tenant_history")
    print(limit.e2e_s.mean(), history.e2e_s.mean())
    assert history.e2e_s.mean() < 0.7 * limit.e2e_s.mean()


def view(tenant: str = "t", max_tokens: int = 100) -> RequestView:
    return RequestView("r", tenant, 0.0, 0, 10, max_tokens, 1)


def test_estimators() -> None:
    assert MaxTokens().predict(view()) == 100
    history = TenantHistory()
    assert history.predict(view()) == 100
    history.learn(view(), 20)
    assert history.predict(view()) == 20
    history.learn(view(), 70)
    assert history.predict(view()) == 21
    assert history.predict(view(max_tokens=5)) == 5
    assert history.predict(view("other")) == 100
    for number in range(20_000):
        history.learn(view(str(number)), 1)
    assert len(history._mean) == 10_000


class Half:
    """A third party's estimator."""

    def predict(self, request: RequestView) -> float:
        return request.max_tokens / 2

    def learn(self, request: RequestView, generated: int) -> None: ...


class FakeEntryPoint:
    name = "half"

    def load(self) -> type[Half]:
        return Half


def test_an_estimator_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_estimators, "entry_points", lambda group: [FakeEntryPoint()])
    policy = load_policy("sjf", {"estimator": "half"})
    assert isinstance(policy, Sjf) and isinstance(policy._estimator, Half)
    with pytest.raises(WrongParameters, match="there is no 'quarter'; there are: half, max_tokens, tenant_history"):
        load_policy("sjf", {"estimator": "quarter"})
