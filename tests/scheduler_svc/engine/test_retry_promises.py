"""Clients that were refused for their deadlines and retry at the promised time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.engine.retry_promises import MOST_PROMISES, PROMISED_PART, RetryPromises
from scheduler_svc.model.intake import build_request
from scheduler_svc.model.promise import KEPT_S, Promise
from scheduler_svc.model.sequence import Request
from scheduler_svc.plan.plan_draft import pack
from tests.scheduler_svc.engine.test_overload import finish, stack_with_runner
from tests.support.in_process import Stack, Submitted

LATE = {"timeout_ms": 8_000}


def request_of(prompt: list[int], now_s: float = 0.0, timeout_s: float = 5.0, **fields: Any) -> Request:
    fields.setdefault("sampling", plan_pb2.Sampling(temperature=1, top_p=1))
    submit = engine_pb2.Submit(
        prompt=pack(prompt), max_tokens=10, n=fields.pop("n", 1), timeout_ms=int(timeout_s * 1000), **fields
    )
    return build_request(submit, b"", 0, now_s)


def promise_at(due_at: float, work_s: float = 0.1) -> Promise:
    return Promise(place_at=-3.0, due_at=due_at, timeout_s=5.0, work_s=work_s)


def crowded(**settings: Any) -> tuple[Stack, int]:
    """Returns a stack with two slots, a known pace, and a backlog of about 20 s."""
    stack, session = stack_with_runner(slots=2, check=False, **settings)
    for _ in range(120):
        stack.submit([1, 2], 10)
    stack.advance(session, turns=80, turn_s=0.1)
    return stack, session


def told_s(request: Submitted) -> float:
    assert request.refused is not None
    return request.refused.retry_after_ms / 1000


def wait_until(stack: Stack, session: int, at_s: float) -> None:
    """New requests arrive as fast as others are served, so the backlog stays the same."""
    while stack.now_s < at_s:
        stack.submit([1, 2], 10)
        stack.advance(session, turns=3, turn_s=0.1)


def test_the_same_request_is_taken_at_its_time_and_once() -> None:
    stack, session = crowded()
    first = stack.submit([1, 2], 10, request_id="a", seed=1, **LATE)
    stack.step()
    due_at = stack.now_s + told_s(first)
    wait_until(stack, session, due_at)
    others = [
        stack.submit([1, 2], 10, tenant="other", **LATE),
        stack.submit([1, 3], 10, **LATE),
        stack.submit([1, 2], 11, **LATE),
        stack.submit([1, 2], 10, n=2, **LATE),
        stack.submit([1, 2], 10, timeout_ms=7_000),
    ]
    back = stack.submit([1, 2], 10, request_id="b", seed=2, **LATE)
    again = stack.submit([1, 2], 10, **LATE)
    stack.step()
    assert all(other.refused is not None for other in others)
    assert back.refused is None and again.refused is not None
    came_s = stack.now_s
    while back.streams[0].end is None:
        wait_until(stack, session, stack.now_s + 0.3)
    assert stack.now_s - came_s <= 8.0 and len(back.streams[0].tokens) == 10
    finish(stack, session)


def test_one_that_comes_too_early_hears_what_is_left() -> None:
    stack, session = crowded()
    first = stack.submit([1, 2], 10, **LATE)
    stack.step()
    said_s, at_s = told_s(first), stack.now_s
    wait_until(stack, session, at_s + said_s / 3)
    early = stack.submit([1, 2], 10, **LATE)
    stack.step()
    assert stack.now_s + told_s(early) == pytest.approx(at_s + said_s, abs=0.01)
    wait_until(stack, session, at_s + said_s)
    back = stack.submit([1, 2], 10, **LATE)
    stack.step()
    assert back.refused is None


def test_a_promise_is_void_where_the_load_is_clearly_worse() -> None:
    """Requests that the policy ranks ahead of it arrived in the meantime: it would be late at its place too."""
    stack, session = crowded(policy="priority", policy_parameters={"ageing_s": 1000, "preempt": False})
    first = stack.submit([1, 2], 10, **LATE)
    stack.step()
    for _ in range(200):
        stack.submit([1, 2], 10, priority=1)
    stack.advance(session, turns=int(told_s(first) * 10) + 1, turn_s=0.1)
    back = stack.submit([1, 2], 10, **LATE)
    stack.step()
    assert back.refused is not None and told_s(back) > told_s(first)


def test_what_is_no_longer_asked_for_is_forgotten() -> None:
    book, request = RetryPromises(), request_of([1])
    book.keep(request, promise_at(2.0), 0.0)
    assert book.of(request_of([1], 2.0 + KEPT_S), 2.0 + KEPT_S) is not None
    late_s = 2.1 + KEPT_S
    assert book.of(request_of([1], late_s), late_s) is None
    book.keep(request_of([2], late_s), promise_at(late_s + 1), late_s)
    assert len(book) == 1


def test_the_book_is_bounded_and_the_oldest_give_way() -> None:
    book = RetryPromises()
    for number in range(MOST_PROMISES + 10):
        book.keep(request_of([number]), promise_at(5.0), 0.0)
    assert len(book) == MOST_PROMISES == len(book._due)
    assert book.of(request_of([9]), 0.0) is None and book.of(request_of([10]), 0.0) is not None


def test_a_promise_is_for_the_same_request() -> None:
    book, sampling = RetryPromises(), plan_pb2.Sampling(temperature=0.5, top_p=1)
    book.keep(request_of([1], request_id="a", seed=1, tenant="t"), promise_at(1.0), 0.0)
    assert book.of(request_of([1], request_id="b", seed=2, tenant="t"), 0.0) is not None
    assert book.of(request_of([1], timeout_s=4.9, tenant="t"), 0.0) is not None  # a call's own deadline varies slightly
    changes: list[dict[str, Any]] = [
        {"tenant": "u"}, {"tenant": "t", "priority": 1}, {"tenant": "t", "n": 2}, {"tenant": "t", "grammar": "x"},
        {"tenant": "t", "sampling": sampling}, {"tenant": "t", "timeout_s": 4.0}, {"tenant": "t", "cache_salt": "s"},
    ]  # fmt: skip
    for change in changes:
        assert book.of(request_of([1], **change), 0.0) is None, change


def test_many_promises_at_once_fall_due_as_slots_can_serve_them() -> None:
    """The returning requests take at most their part of what is served until then."""
    book, work_s, dues = RetryPromises(), 0.2, []
    for number in range(100):
        due_at = book.earliest_at(0.0, 3.0)
        book.keep(request_of([number]), promise_at(due_at, work_s), 0.0)
        dues.append(due_at)
    claimed = 0.5  # the assumed part of clients that return
    for due_at in sorted(set(dues)):
        assert sum(due <= due_at for due in dues) * work_s * claimed <= PROMISED_PART * due_at + work_s
    assert np.all(np.diff(dues) >= 0) and dues[-1] > 15


def test_a_newcomer_counts_those_that_will_go_ahead() -> None:
    book = RetryPromises()
    for number in range(10):
        book.keep(request_of([number]), promise_at(1.0 + number), 0.0)
    assert book.expected(0.0, 0.5) == 0 and book.expected(0.0, 4.5) == pytest.approx(2.0)
    for number in range(10):
        book.redeem(request_of([number]))
    assert len(book) == 0 and book.expected(0.0, 20.0) == 0
    book.keep(request_of([1]), promise_at(1.0), 0.0)
    assert book.expected(0.0, 2.0) > 0.8  # all of them return here
