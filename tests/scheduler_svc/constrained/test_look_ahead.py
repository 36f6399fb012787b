"""When a plan waits for the answer about forced tokens, and for how long."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_svc.constrained import mask_requests
from scheduler_svc.constrained.look_ahead import LookAhead
from scheduler_svc.plan.forced_rows import may_pay
from tests.scheduler_svc.constrained.test_constraints import EOS_PROBABILITY, backend, submit
from tests.support.in_process import Stack
from tests.support.lockstep import advance, advance_until_idle


def test_it_pays_by_the_times_and_by_how_often_runs_begin() -> None:
    tied: list[Any] = [SimpleNamespace(forced_share=0.25) for _ in range(2)]
    ahead = LookAhead()
    assert not ahead.pays(tied, 2), "no step has been timed yet"
    for _ in range(100):
        ahead.stepped(0.01)
        ahead.asked(5.0)
        ahead.answered(5.0002)
    assert ahead.pays(tied, 2) and ahead.pays(tied[:1], 1)
    assert not ahead.pays(tied[:1], 40), "most rows would wait in vain"
    for _ in range(100):
        for sequence in tied:
            ahead.note(sequence, 0)
    assert not ahead.pays(tied, 2), "no run has begun for long"
    for _ in range(5):
        ahead.note(tied[0], 3)
    assert ahead.pays(tied, 2)
    for _ in range(200):
        ahead.asked(0.0)
        ahead.answered(0.005)
    assert not ahead.pays(tied, 2), "answers take half as long as a step"


def test_the_next_plan_waits_for_an_answer_but_not_for_long() -> None:
    stack = Stack(depth=1)
    session = stack.add_runner(backend())
    stack.step()
    stack.late = random.Random()
    answers, stack.late.random = [1.0], lambda: answers[0]  # type: ignore[method-assign]
    request = submit(stack, "regex", "[ab]{4}c{9}[ab]")
    advance(stack, 2)
    before = len(request.streams[0].tokens)
    answers[0] = 0.0  # from now on requests are made, and answers are late
    advance(stack)
    assert len(request.streams[0].tokens) == before + 1
    for _ in range(5):
        stack.step()
        assert not stack.runners.plans[session], "the plan is held back"
    stack.now_s += 0.1
    stack.step()
    assert stack.runners.plans[session], "it is made without the answer"
    stack.late = None
    advance_until_idle(stack)
    assert request.streams[0].tokens == request.expected(0, EOS_PROBABILITY)


def test_no_plan_waits_for_a_run_that_it_would_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with a few forced tokens takes all of its rows many times as long as one without."""
    monkeypatch.setattr(LookAhead, "pays", lambda ahead, sequences, running: True)
    asked = []
    for mixed_s in (1.0, 50.0):
        stack = Stack(depth=1)
        session = stack.add_runner(backend())
        stack.step()
        scheduler = stack.engine.pool.schedulers[session]
        times = SimpleNamespace(known=True, seconds=lambda tokens, *_, mixed_s=mixed_s: mixed_s if tokens else 1.0)
        monkeypatch.setattr(mask_requests, "may_pay", lambda *args, times=times: may_pay(*args[:3], times))
        monkeypatch.setattr(LookAhead, "asked", lambda ahead, now_s, mixed_s=mixed_s: asked.append(mixed_s) or 0.0)
        request = submit(stack, "regex", "[ab]{4}c{9}[ab]")
        advance_until_idle(stack)
        assert scheduler.forces and request.streams[0].tokens == request.expected(0, EOS_PROBABILITY)
    assert set(asked) == {1.0}
