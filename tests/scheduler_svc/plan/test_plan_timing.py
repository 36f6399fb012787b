"""Plans that are held back: by a given lead, and by one that is learned from the runner."""

from __future__ import annotations

import math
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.plan.plan_lead import FEWEST, MARGIN_S, WINDOW, PlanLead
from scheduler_svc.plan.plan_timing import PlanTiming, TimingRule
from scheduler_svc.settings.profiles import PROFILES
from scheduler_svc.simulator.outcome import Outcome
from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.trace import Trace, TraceRequest
from scheduler_svc.step_times.recent_steps import RecentSteps
from scheduler_svc.step_times.step_time_model import StepTimeModel
from tests.support.in_process import Stack
from tests.support.simulated_cost import round_cost
from tests.support.step_costs import costs_of
from tests.support.thoroughness import choice

STEP_S = 0.020


def test_the_last_steps_of_about_that_size_count() -> None:
    recent = RecentSteps()
    assert recent.median_s(1000, True) == 0.0
    for seconds in (0.5, 0.3, 0.4):
        recent.record(1000, True, seconds)
    assert recent.median_s(1000, True) == recent.median_s(1010, True) == 0.4
    assert recent.median_s(2000, True) == recent.median_s(500, True) == recent.median_s(1000, False) == 0.0
    for _ in range(8):
        recent.record(1010, True, 0.6)
    assert recent.median_s(1000, True) == 0.6, "old steps are forgotten"


def test_small_sizes_have_classes_of_their_own() -> None:
    recent = RecentSteps()
    for positions in range(1, 17):
        recent.record(positions, False, positions / 1000)
    assert [recent.median_s(size, False) for size in (1, 2, 8, 15, 16)] == [0.001, 0.002, 0.008, 0.015, 0.016]


class Timed:
    """A stack whose steps take STEP_S each, one after another. Its runner does not report early plans."""

    def __init__(self, **settings: object) -> None:
        self.stack = Stack(**settings)
        backend = HashBackend(num_slots=4, block_size=4, num_blocks=64, max_step_tokens=64, eos_probability=0.0)
        self.session = self.stack.add_runner(backend)
        self.stack.step()

    @property
    def in_flight(self) -> int:
        (scheduler,) = self.stack.engine.pool.schedulers.values()
        return len(scheduler.in_flight)

    def finish_step(self) -> None:
        """Advances the clock to the end of the oldest plan."""
        self.stack.now_s += STEP_S
        self.stack.runners.execute(self.session)
        self.stack.runners.deliver(self.session)
        self.stack.step()


def test_plans_leave_as_soon_as_the_depth_allows_by_default() -> None:
    timed = Timed()
    timed.stack.submit([1, 2, 3], 40)
    timed.stack.step()
    for _ in range(5):
        assert timed.in_flight == 2
        timed.finish_step()


def test_a_plan_is_held_back_until_shortly_before_the_runner_runs_dry() -> None:
    timed = Timed(plan_lead_ms=5.0)
    stack = timed.stack
    stack.submit([1, 2, 3], 40)
    stack.step()
    for _ in range(3):
        timed.finish_step()  # no such step is known yet: at once
    begin_at = stack.now_s
    assert timed.in_flight == 1, "held back"
    assert stack.engine.wake_at == pytest.approx(begin_at + 0.9 * STEP_S - 0.005)
    late = stack.submit([4, 5], 2)  # arrives while the plan is delayed, and is in it
    stack.now_s = begin_at + 0.9 * STEP_S - 0.006
    stack.step()
    assert timed.in_flight == 1
    stack.now_s = begin_at + 0.9 * STEP_S - 0.004
    stack.step()
    assert timed.in_flight == 2
    stack.now_s = begin_at
    timed.finish_step()
    timed.finish_step()
    assert late.first_sequence_id is not None
    assert len(stack.streams[late.first_sequence_id].tokens) == 1


def test_a_given_lead_holds_plans_by_the_step_times_that_the_runner_measured() -> None:
    times = StepTimeModel(costs=costs_of(lambda decode, chunks: 0.004 + 1e-5 * sum(count for _, count in chunks)))
    starts, counts = (np.array(column, np.int32) for column in ([500, 0], [1, 999]))
    flight: Any = SimpleNamespace(
        sent_at=1.0, starts=starts, counts=counts, num_decode=1, prefills=True, expected_s=0.0, drafts=None
    )
    expected_s = times.expected_s(starts, counts, 1)
    assert expected_s > 0
    timing = PlanTiming(TimingRule(lead_s=0.002), deque([flight]), times, lambda: 0.0)
    assert timing.due_at(full=False) == pytest.approx(1.0 + 0.9 * expected_s - 0.002)
    assert timing.next_result_at == pytest.approx(1.0 + expected_s), "one prediction for both"


def test_nothing_is_held_back_while_the_runner_is_idle() -> None:
    timed = Timed(plan_lead_ms=5.0)
    for _ in range(6):
        timed.stack.submit([1, 2, 3], 2)
        timed.stack.step()
        assert timed.in_flight > 0
        for _ in range(3):
            timed.finish_step()
        assert timed.stack.engine.requests.idle


def test_without_reports_of_the_runner_plans_leave_at_once_whatever_the_profile() -> None:
    for profile in PROFILES:
        timed = Timed(profile=profile)
        timed.stack.submit([1, 2, 3], 30)
        timed.stack.step()
        for _ in range(20):
            assert timed.in_flight == 2
            timed.finish_step()


def test_the_lead_is_a_high_quantile_of_what_the_last_plans_needed() -> None:
    lead = PlanLead(1 / 32)
    for needed_s in range(FEWEST - 1):
        lead.note(False, needed_s / 1000)
    assert lead.seconds(False) == lead.seconds(True) == math.inf, "unknown"
    rng = random.Random(5)
    last = [rng.random() / 1000 for _ in range(3 * WINDOW)]
    for needed_s in last:
        lead.note(False, needed_s)
    assert lead.seconds(False) == pytest.approx(sorted(last[-WINDOW:])[-1 - WINDOW // 32] + MARGIN_S)
    for _ in range(WINDOW):
        lead.note(False, -0.001)
    assert lead.seconds(False) == MARGIN_S, "never after the runner has run out of work"


def served(step_s: float, spread: float, rate: float, **fields: object) -> tuple[Simulation, Outcome]:
    """Returns a run of 60 short requests that arrive one by one, on a runner half a millisecond away."""
    rng, at_s, requests = random.Random(2), 0.0, []
    for _ in range(60):
        at_s += rng.expovariate(rate)
        requests.append(TraceRequest(at_s, 50, 40))
    cost = round_cost(fixed_s=step_s, token_s=1e-6, link_s=0.0005)
    setup = Setup(cost, slots=64, kv_tokens=65536, spread=spread, fast_forwards=False, **fields)  # type: ignore[arg-type]
    simulation = Simulation(Trace("short", tuple(requests)), setup)
    return simulation, simulation.run()


@pytest.mark.parametrize("spread", choice([0.0, 0.1], in_ci=[0.1]))
def test_held_plans_take_later_arrivals_and_cost_no_throughput(spread: float) -> None:
    """Steps of 30 ms: without a lead, a request waits for the step that runs and for the one that is planned."""
    _, at_once = served(0.03, spread, 4.0)
    simulation, held = served(0.03, spread, 4.0, profile="balanced")
    (scheduler,) = simulation.engine.pool.schedulers.values()
    assert held.ttft_s.mean() < at_once.ttft_s.mean() - 0.015
    assert held.itl_s.mean() < at_once.itl_s.mean() * 1.01
    assert held.counters.virtual_s < at_once.counters.virtual_s * 1.005
    assert scheduler.timing.late_plans < 0.12 * scheduler.last_plan
    leads_s = scheduler.timing.leads_s
    assert all(0.001 < lead_s < 0.0025 + 0.1 * spread for lead_s in leads_s), leads_s


def test_a_third_plan_is_made_only_where_the_runner_would_run_dry() -> None:
    """Steps of 1 ms: a plan needs more than that to reach the runner."""
    _, at_once = served(0.001, 0.03, 60.0)
    _, held = served(0.001, 0.03, 60.0, profile="balanced")
    assert held.itl_s.mean() < at_once.itl_s.mean() * 0.97
    assert held.ttft_s.mean() < at_once.ttft_s.mean() * 1.1
    _, long_steps = served(0.03, 0.0, 4.0, profile="throughput")
    _, two = served(0.03, 0.0, 4.0)
    assert long_steps.ttft_s.mean() == pytest.approx(two.ttft_s.mean(), rel=0.01)


def test_nothing_is_held_back_when_no_request_could_join() -> None:
    timed = Timed()
    (scheduler,) = timed.stack.engine.pool.schedulers.values()
    timed.stack.submit([1, 2, 3], 40)
    for _ in range(FEWEST):
        timed.finish_step()
        flight = scheduler.in_flight[0]
        flight.ahead_s = 0.005
        scheduler.timing.learn(flight, STEP_S, 0.001)
    scheduler.in_flight.pop()
    expected = timed.stack.now_s + STEP_S - 0.004 - MARGIN_S
    assert scheduler.timing.due_at(full=False) == pytest.approx(expected)
    assert scheduler.timing.due_at(full=True) == 0.0
