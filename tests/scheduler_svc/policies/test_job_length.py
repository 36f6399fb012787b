"""Policies that order by length: no request starves beyond the ageing bound; estimators of output lengths."""

from __future__ import annotations

import pytest

from scheduler_svc.policies import length_estimators
from scheduler_svc.policies.length_estimators import MaxTokens, TenantHistory
from scheduler_svc.policies.sjf import Sjf
from scheduler_svc.policy import RequestView, WrongParameters, load_policy
from tests.support.job_lengths import heavy_tail, run


@pytest.mark.parametrize("policy", ["sjf", "ljf"])
def test_no_request_is_overtaken_by_one_beyond_the_bound(policy: str) -> None:
    ageing_s = 2.0
    outcome = run(heavy_tail(2), policy, ageing_s=ageing_s)
    overtaken = 0
    for i in range(len(outcome.arrival_s)):
        later = outcome.arrival_s > outcome.arrival_s[i] + ageing_s
        # prompts differ, so a slot taken a step earlier may still mean a first token a step later
        assert (outcome.first_token_s[later] >= outcome.first_token_s[i] - 0.1).all(), i
        overtaken += int(
            (outcome.first_token_s[outcome.arrival_s > outcome.arrival_s[i]] < outcome.first_token_s[i]).sum()
        )
    assert overtaken > 100, "within the bound they are"


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
    """A third-party estimator."""

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
    assert isinstance(policy, Sjf) and isinstance(policy._length.estimator, Half)
    with pytest.raises(WrongParameters, match="'quarter' is not installed; available are: half, max_tokens"):
        load_policy("sjf", {"estimator": "quarter"})
