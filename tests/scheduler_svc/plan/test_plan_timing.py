"""Predicted step times, and plans that are delayed by them."""

from __future__ import annotations

import pytest

from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.step_times.recent_steps import RecentSteps
from tests.support.in_process import Stack

STEP_S = 0.020


def test_the_last_steps_of_about_that_size_count() -> None:
    recent = RecentSteps()
    assert recent.least_s(1000, True) == recent.median_s(1000, True) == 0.0
    for seconds in (0.5, 0.3, 0.4):
        recent.record(1000, True, seconds)
    assert recent.least_s(1000, True) == recent.least_s(1010, True) == 0.3
    assert recent.median_s(1010, True) == 0.4
    assert recent.least_s(2000, True) == recent.least_s(500, True) == recent.least_s(1000, False) == 0.0
    for _ in range(8):
        recent.record(1010, True, 0.6)
    assert recent.least_s(1000, True) == 0.6, "old steps are forgotten"


def test_small_sizes_have_classes_of_their_own() -> None:
    recent = RecentSteps()
    for positions in range(1, 17):
        recent.record(positions, False, positions / 1000)
    assert [recent.least_s(size, False) for size in (1, 2, 8, 15, 16)] == [0.001, 0.002, 0.008, 0.015, 0.016]


class Timed:
    """A stack whose steps take STEP_S each, one after another."""

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


def test_nothing_is_held_back_while_the_runner_is_idle() -> None:
    timed = Timed(plan_lead_ms=5.0)
    for _ in range(6):
        timed.stack.submit([1, 2, 3], 2)
        timed.stack.step()
        assert timed.in_flight > 0
        for _ in range(3):
            timed.finish_step()
        assert timed.stack.engine.requests.idle
