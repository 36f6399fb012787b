"""Requests whose grammar is being compiled: their order, and events that happen to them meanwhile."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from scheduler_svc.constrained import constraints
from scheduler_svc.model.refusal import RefusalReason
from scheduler_svc.model.sequence import FinishReason
from tests.scheduler_svc.constrained.test_constraints import assert_whole, backend, sampling, submit
from tests.support.in_process import Stack
from tests.support.lockstep import advance, advance_until_idle
from tests.support.mask_handles import Inline, local_client


class Held(Inline):
    """Jobs run when the test calls `do_one`."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()

    def run(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self._open += 1
        self.jobs.append((work, then))

    def do_one(self) -> None:
        work, then = self.jobs.popleft()
        self._done.put((work(), then))


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def stack(held: Held) -> Stack:
    """A stack where each grammar takes a second."""
    stack = Stack()
    seconds = itertools.count()
    stack.engine.constraints.work_in(held, Inline(), local_client, clock=lambda: float(next(seconds)))
    stack.add_runner(backend())
    stack.step()
    return stack


def test_a_flood_of_fresh_grammars_delays_its_own_tenant(stack: Stack, held: Held) -> None:
    flood = [submit(stack, "regex", f"[ab]{{{number + 2}}}", tenant="flood") for number in range(20)]
    stack.step()
    for _ in range(3):
        held.do_one()
        stack.step()
    single = submit(stack, "regex", "[cd]{9}", tenant="single")
    stack.step()
    turns = 0
    while not single.streams:
        held.do_one()
        stack.step()
        turns += 1
    assert turns <= 2, "the job that ran at its arrival, and its own"
    assert sum(bool(request.streams) for request in flood) == 4
    while held.jobs:
        held.do_one()
        stack.step()
    advance_until_idle(stack)
    assert_whole([single, *flood])


@pytest.mark.parametrize("how", ["cancel", "deadline", "drain"])
def test_it_may_end_before_its_grammar_is_compiled(stack: Stack, held: Held, how: str) -> None:
    """Its client gets the same messages as for any other: accepted, then its end."""
    fields = {"timeout_ms": 500} if how == "deadline" else {}
    request = submit(stack, "regex", "[ab]{12}", n=2, **fields)
    stack.step()
    assert held.jobs and not request.streams
    if how == "cancel":
        stack.front.put(cancel={"handle": request.handle})
    elif how == "deadline":
        stack.now_s += 1
    else:
        stack.front.put(drain={"handle": 99, "timeout_ms": 0})
        stack.step()
        stack.engine.shutdown.finish()
    stack.step()
    reasons = {stream.end and stream.end.reason for stream in request.streams}
    expected = {"cancel": FinishReason.CANCELLED, "deadline": FinishReason.DEADLINE, "drain": FinishReason.UNAVAILABLE}
    assert reasons == {expected[how]} and len(request.streams) == 2
    held.do_one()
    advance(stack, 2)
    stack.assert_clean()
    assert stack.engine.requests.totals.requests == stack.engine.requests.totals.finished / 2 == 1


def test_one_that_has_ended_is_not_compiled(stack: Stack, held: Held) -> None:
    requests = [submit(stack, "regex", f"[ab]{{{number + 2}}}") for number in range(3)]
    stack.step()
    stack.front.put(cancel={"handle": requests[1].handle})
    stack.step()
    held.do_one()
    stack.step()
    held.do_one()
    stack.step()
    assert not held.jobs
    advance_until_idle(stack)
    assert_whole([requests[0], requests[2]])


def test_attached_meanwhile(stack: Stack, held: Held) -> None:
    """The same request sent again takes it over. If it can't be compiled, it then ends instead of being refused."""
    good, bad = submit(stack, "regex", "[ab]{6}", seed=3), submit(stack, "regex", "(a")
    good.seed = 3
    stack.step()
    for request in (good, bad):
        stack.attach(request)
    stack.step()
    while held.jobs:
        held.do_one()
        stack.step()
    advance_until_idle(stack)
    assert_whole([good])
    end = bad.streams[0].end
    assert end is not None and end.reason == FinishReason.ERROR and "unclosed group" in end.message
    assert stack.engine.requests.totals.requests == stack.engine.requests.totals.finished == 2


def test_no_more_may_wait_than_there_is_room_for(stack: Stack, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "MOST_OF_A_TENANT", 3)
    many = [submit(stack, "regex", "a{3}", tenant="a") for _ in range(6)]
    other = submit(stack, "regex", "b{3}", tenant="b")
    free = stack.submit([1, 2], 5, tenant="a", sampling=sampling(1.0))
    stack.step()
    refused = [request.refused for request in many if request.refused is not None]
    assert len(refused) == 2, "one is being compiled, and three wait"
    for each in refused:
        assert each.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0] and each.retry_after_ms
    assert stack.engine.requests.totals.refusals == {RefusalReason.QUEUE_FULL: 2}
    while held.jobs:
        held.do_one()
        stack.step()
    advance_until_idle(stack)
    assert_whole([request for request in many if request.refused is None] + [other])
    assert free.streams[0].end is not None
