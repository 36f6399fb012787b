"""The estimate of early refusals, on a clock of the test's."""

from __future__ import annotations

import pytest

from scheduler_svc.waiting.service_rate import LONGEST_GAP_S, ServiceRate


def steady(rate: ServiceRate, start_s: float, seconds: float, waiting: int = 5) -> float:
    """A result every 0.1 s with 8 tokens, and every second four sequences end; returns the time then."""
    now_s = start_s
    for step in range(round(seconds * 10)):
        now_s = start_s + (step + 1) / 10
        rate.observe(now_s, tokens=8, ended=4 if step % 10 == 9 else 0, waiting=waiting)
    return now_s


def test_nothing_is_known_without_evidence() -> None:
    rate = ServiceRate()
    assert not rate.known
    with pytest.raises(ValueError, match="not enough evidence"):
        rate.wait_s(1)
    steady(rate, 0, 20, waiting=0)  # an idle service shows nothing of what it could do
    assert not rate.known


def test_wait_and_service_follow_from_the_pace() -> None:
    rate = ServiceRate()
    steady(rate, 100, 20)
    # 80 tokens and 4 ends a second: 20 tokens a sequence; 8 run, so 10 tokens a second each.
    assert rate.known
    assert rate.wait_s(8) == pytest.approx(2, rel=0.1)
    assert rate.service_s(1000, running=8) == pytest.approx(2, rel=0.1)
    assert rate.service_s(5, running=8) == pytest.approx(0.5, rel=0.1)


def test_idle_times_and_outages_do_not_count() -> None:
    rate = ServiceRate()
    now_s = steady(rate, 0, 20)
    rate.observe(now_s + 0.1, 8, 0, waiting=0)
    before = rate.wait_s(8)
    now_s = steady(rate, now_s + 3600, 0.1, waiting=5)  # an hour in which nobody came
    assert rate.wait_s(8) == pytest.approx(before, rel=0.05)
    rate.observe(now_s + 3600, 8, 0, waiting=5)  # an hour without a result while somebody waited
    assert rate.wait_s(8) < before * (1 + LONGEST_GAP_S)


def test_old_evidence_fades() -> None:
    rate = ServiceRate()
    now_s = steady(rate, 0, 60)
    for step in range(1200):  # two minutes at a tenth of the pace
        rate.observe(now_s + step / 10, tokens=1, ended=1 if step % 25 == 24 else 0, waiting=5)
    assert rate.wait_s(4) == pytest.approx(10, rel=0.3)
