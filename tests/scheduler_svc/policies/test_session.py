"""`session` values contexts by their chance to come back soon, and keeps its promises on the simulator."""

from __future__ import annotations

import math
from typing import Any

import pytest

from scheduler_svc.policies.session import Session, SessionParameters
from scheduler_svc.policy import Gaps, Load, PrefixView, Returns

LOAD = Load(0, 0, 8, 0, 0, 100, 100, 16, 512)


def view(**more: Any) -> PrefixView:
    usual = PrefixView(
        tenant="",
        conversation="x",
        tokens=1000,
        shared=False,
        users=1,
        turns=3,
        awaited_s=None,
        idle_s=1.0,
        gaps=Gaps(),
        all_gaps=gaps(5.0, 0.5, 50),
        returns=Returns(100, 95),
        tenant_share=0.5,
        tenants=1,
    )
    return usual._replace(**more)


def gaps(median_s: float, spread: float, count: int) -> Gaps:
    return Gaps(count, math.log(median_s), spread**2)


def value(**more: Any) -> float:
    return Session(SessionParameters()).retain(view(**more), LOAD)


def test_a_hint_tells_who_comes_back_first() -> None:
    soon, later = value(next_turn_s=2.0, idle_s=1.0), value(next_turn_s=60.0, idle_s=1.0)
    assert soon > 5 * later > 0
    assert value(next_turn_s=60.0, idle_s=50.0) > 1.5 * later


def test_an_overdue_hint_is_doubted() -> None:
    assert value(next_turn_s=2.0, idle_s=200.0) < 0.2 * value(next_turn_s=2.0, idle_s=1.0)
    assert value(next_turn_s=2.0, idle_s=200.0, all_gaps=gaps(5, 2.0, 50)) > 0


def test_a_conversation_that_is_over_is_worth_nothing() -> None:
    assert value(retain_s=0.0) == 0
    assert value(retain_s=10.0, idle_s=11.0) == 0 < value(retain_s=10.0, idle_s=9.0)


def test_without_hints_the_learned_gaps_decide() -> None:
    assert value(idle_s=1.0) > value(idle_s=30.0) > value(idle_s=300.0)
    often, seldom = value(gaps=gaps(2, 0.3, 60), idle_s=1.0), value(gaps=gaps(200, 0.3, 60), idle_s=1.0)
    assert often > 10 * seldom
    assert value(returns=Returns(100, 2)) < 0.2 * value()


def test_a_waiting_request_outranks_all_hints_and_the_first_comes_first() -> None:
    assert value(awaited_s=9.0) > value(awaited_s=0.5) > value(next_turn_s=1.0, idle_s=0.9)


def test_what_many_share_is_worth_its_rate_of_use() -> None:
    busy, quiet = value(shared=True, gaps=gaps(1, 0.5, 50)), value(shared=True, gaps=gaps(100, 0.5, 50))
    assert busy > 20 * quiet
    assert value(shared=True, gaps=gaps(1, 0.5, 50), idle_s=100.0) == pytest.approx(0.01)


def test_a_tenant_below_its_floor_goes_before_all_others() -> None:
    quiet = value(tenant_share=0.3, tenants=2, idle_s=300.0)
    assert quiet > value(tenant_share=0.6, tenants=2, awaited_s=5.0)
    assert value(tenant_share=0.3, tenants=2, retain_s=0.0) == 0


def test_it_prefetches_before_a_hint_or_a_steady_return() -> None:
    policy = Session(SessionParameters(lead_s=1.5))
    assert policy.prefetch_s(view(next_turn_s=10.0), LOAD) == 8.5
    assert policy.prefetch_s(view(next_turn_s=1.0), LOAD) == 0
    assert policy.prefetch_s(view(gaps=gaps(20.0, 0.1, 9)), LOAD) == pytest.approx(18.5)
    assert policy.prefetch_s(view(gaps=gaps(20.0, 2.0, 9)), LOAD) is None
    assert policy.prefetch_s(view(retain_s=0.0, next_turn_s=5.0), LOAD) is None
