"""Consecutive losses of runners: how long each runner is held back, and how many records are kept."""

from __future__ import annotations

from scheduler_svc.failure.runner_illness import (
    FIRST_HOLD_S,
    FORGET_S,
    HELD_FROM,
    LONGEST_HOLD_S,
    MOST_REMEMBERED,
    RunnerIllness,
)
from scheduler_svc.settings.scheduler_settings import SchedulerSettings


def test_holds_double_up_to_the_longest() -> None:
    runners = RunnerIllness()
    holds_s = [runners.lost("r", "a fault", 5.0).hold_s for _ in range(2000)]
    assert holds_s[: HELD_FROM - 1] == [0.0] * (HELD_FROM - 1), "a first loss may be chance"
    doubled = holds_s[HELD_FROM - 1 : HELD_FROM + 4]
    assert doubled == [FIRST_HOLD_S * 2**power for power in range(5)]
    assert holds_s[-1] == LONGEST_HOLD_S and sorted(holds_s) == holds_s
    assert runners.is_held("r") and not runners.is_held("another")


def test_a_faulty_runner_gets_several_probes_before_streams_end_for_want_of_one() -> None:
    runners, now_s, probes = RunnerIllness(), 0.0, 0
    runners.lost("r", "a fault", now_s)
    while (now_s := runners.lost("r", "a fault", now_s).until_at) < SchedulerSettings().no_runner_s:
        probes += 1
    assert probes >= 6


def test_a_finished_plan_ends_the_row() -> None:
    runners = RunnerIllness()
    for _ in range(4):
        illness = runners.lost("r", "a fault", 0.0)
    runners.recovered("r")
    assert runners.of("r") is None and illness.hold_s == 0.0, "the dropped record holds nothing back either"
    assert runners.lost("r", "a fault", 1.0).losses == 1
    runners.recovered("unknown")


def test_runners_are_forgotten_by_time_and_by_number() -> None:
    runners = RunnerIllness()
    runners.lost("old", "a fault", 0.0)
    runners.lost("young", "a fault", 10.0)
    runners.forget(FORGET_S + 5.0)
    assert [illness.runner_id for illness in runners] == ["young"]
    runners.lost("frequent", "a fault", 0.0)
    for number in range(MOST_REMEMBERED):
        runners.lost(f"r{number}", "a fault", 0.0)
        runners.lost("frequent", "a fault", 0.0)
    assert len(list(runners)) == MOST_REMEMBERED
    assert runners.of("young") is None and runners.is_held("frequent")
