"""StepBudget: a step takes what fits, and overflows at most once, for a prompt that it completes."""

from __future__ import annotations

import random

from scheduler_svc.policy import Budget
from scheduler_svc.scheduler.step_budget import StepBudget


def test_a_prompt_that_does_not_fit_is_split() -> None:
    room = StepBudget.of(Budget(100), 10, 512)
    assert room.chunk(60) == 60
    room.use(60)
    assert room.chunk(60) == 40
    room.use(40)
    assert room.chunk(1) == 0


def test_a_whole_prompt_waits_unless_no_step_could_hold_it() -> None:
    room = StepBudget.of(Budget(100, may_chunk=False), 0, 512)
    assert (room.chunk(100), room.chunk(101), room.chunk(513)) == (100, 0, 100)


def test_only_a_prompt_that_it_completes_overflows_the_step() -> None:
    room = StepBudget.of(Budget(100, overflow=28), 0, 512)
    assert (room.chunk(128), room.chunk(129)) == (128, 100)
    room.use(128)
    assert room.chunk(1) == 0


def test_a_full_step_does_not_overflow() -> None:
    room = StepBudget.of(Budget(100, overflow=28), 0, 512)
    room.use(100)
    assert room.chunk(5) == 0


def test_a_runner_never_gets_more_than_it_can_compute() -> None:
    rng = random.Random(4)
    for _ in range(1000):
        decoding, most = rng.randrange(64), rng.randrange(64, 200)
        budget = Budget(rng.randrange(300), rng.random() < 0.5, overflow=rng.randrange(300))
        room, total = StepBudget.of(budget, decoding, most), decoding
        for _ in range(10):
            count = room.chunk(rng.randrange(1, 300))
            room.use(count)
            total += count
        assert total <= min(most, decoding + budget.prefill_tokens + budget.overflow), (budget, decoding, most)
