"""Terms decide without a clock which scheduler is later: of two that start at once exactly one continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from roster_common.link_protocol import CONTEXTS, TERMS
from roster_protos import plan_pb2
from runner_svc.execution.runner import Runner
from runner_svc.link.plan_socket import PlanSocket
from scheduler_svc.link.runner_events import Fenced, Joined
from scheduler_svc.link.runner_link import RunnerLink
from scheduler_svc.link.terms import OwnTerm, Term
from tests.support.fake_runner import Clock, FakeRunner, await_events, join, settle
from tests.support.link_proxies import TcpProxy
from tests.support.linked_stack import LinkedStack
from tests.support.record_frames import backend

Context = zmq.Context  # type: ignore[type-arg]
DAY_NS = 86_400 * 10**9
LEGACY = 1_790_000_000_000_000_000
"""Term of an older scheduler that used its clock for it."""


@pytest.fixture
def connect(context: Context) -> Callable[[RunnerLink], FakeRunner]:
    """Returns a function that connects a runner, which stays until the test ends."""
    there: list[FakeRunner] = []

    def make(link: RunnerLink) -> FakeRunner:
        there.append(FakeRunner(context, link.endpoint))
        return there[-1]

    return make


Connect = Callable[[RunnerLink], FakeRunner]


def make_link(context: Context) -> RunnerLink:
    return RunnerLink(context, "tcp://127.0.0.1:*", silence_s=5.0, plan_timeout_s=20.0, clock=Clock())


def test_terms_are_compared_as_pairs() -> None:
    assert Term() < Term(1, 0) < Term(1, 7) < Term(2, 3)


@pytest.mark.parametrize("skew_ns", [-DAY_NS, DAY_NS])
def test_a_successor_whose_clock_is_a_day_off_is_the_later_one(
    context: Context, connect: Connect, monkeypatch: pytest.MonkeyPatch, skew_ns: int
) -> None:
    """Also if it meets a fresh runner first: the others report its predecessor later."""
    now_ns, now_s = time.time_ns, time.time
    former = make_link(context)
    join(former, connect(former))
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + skew_ns)
    monkeypatch.setattr(time, "time", lambda: now_s() + skew_ns / 1e9)
    successor = make_link(context)
    join(successor, connect(successor), "fresh")
    held = former.term
    session = join(successor, connect(successor), "r", term=held.number, term_id=held.id)
    assert successor.term > held
    successor.send_plan(session, 1, plan_pb2.Plan())
    old = connect(former)
    former.send_plan(join(former, connect(former), "other"), 1, plan_pb2.Plan())
    old.hello("r", term=successor.term.number, term_id=successor.term.id)
    assert await_events(former) == [Fenced(successor.term)]


def test_pings_tell_of_the_longest_context_that_any_scheduler_met(connect: Connect, link: RunnerLink) -> None:
    """To runners that can report it to the next scheduler, whichever it meets first."""
    small, old = connect(link), connect(link)
    join(link, connect(link), "large", model=plan_pb2.Model(context_length=500))
    old_session = join(link, old, "old", features=[TERMS])
    session = join(link, small, "small", model=plan_pb2.Model(context_length=64), features=[CONTEXTS])
    small.hello("small", session=session)  # it has not heard from the scheduler for a while
    settle(link)
    assert small.hear().ping.longest_context == 500
    join(link, connect(link), "told", model=plan_pb2.Model(context_length=64), longest_context=900)
    small.hello("small", session=session)
    old.hello("old", session=old_session)
    settle(link)
    assert small.hear().ping.longest_context == 900
    assert not old.hear().ping.longest_context


def test_the_number_is_one_more_than_the_greatest_and_goes_on_from_the_times_of_before(
    connect: Connect, link: RunnerLink
) -> None:
    join(link, connect(link), "fresh")
    assert link.term.number == 1
    join(link, connect(link), "a", term=LEGACY)
    assert link.term.number == LEGACY + 1
    join(link, connect(link), "b", term=5)
    assert link.term.number == LEGACY + 1 and link.term.id != 0


def test_runners_that_were_welcomed_before_hear_of_the_raised_term(connect: Connect, link: RunnerLink) -> None:
    """Whichever of them the next scheduler meets first."""
    first, old = connect(link), connect(link)
    join(link, first, "fresh", features=[TERMS])
    join(link, old, "old")
    connect(link).hello("c", term=40)
    await_events(link)
    ping = first.hear().ping
    assert (ping.term, ping.term_id) == (41, link.term.id)
    assert old.hears_nothing()


def test_a_fenced_scheduler_reports_the_fencing_term(connect: Connect, link: RunnerLink) -> None:
    """So that the next process, whichever runner it meets first, is not fenced by the same term again."""
    first = connect(link)
    link.send_plan(join(link, first, "fresh", features=[TERMS]), 1, plan_pb2.Plan())
    first.hear()
    connect(link).hello("c", term=40, term_id=3)
    assert await_events(link) == [Fenced(Term(40, 3))]
    ping = first.hear().ping
    assert (ping.term, ping.term_id) == (40, 3)


def test_before_its_first_plan_it_raises_its_term_instead(connect: Connect, link: RunnerLink) -> None:
    """Whether a newcomer reports a greater one, or a runner that another scheduler has taken in the meantime."""
    runner = connect(link)
    session = join(link, runner)
    runner.say(session, event=plan_pb2.Event(fenced=9))
    (lost,) = await_events(link)
    assert link.term.number == 10 and not isinstance(lost, Fenced)
    other = connect(link)
    other.hello("other", term=10, term_id=(1 << 64) - 1)  # the same number and a greater id
    (joined,) = await_events(link)
    assert isinstance(joined, Joined) and link.term.number == 11


def test_a_term_that_can_not_be_is_no_reason_to_stop(connect: Connect, link: RunnerLink) -> None:
    runner = connect(link)
    runner.hello(term=(1 << 64) - 1)
    assert settle(link) == []
    session = join(link, runner)
    runner.say(session, event=plan_pb2.Event(fenced=(1 << 64) - 1))
    assert settle(link) == []


def test_of_equal_numbers_the_id_decides() -> None:
    first, second = OwnTerm(), OwnTerm()
    for own in (first, second):
        assert own.meet(Term(5, 5))
        own.fix()
    assert first.term.number == second.term.number == 6
    assert first.meet(second.term) != second.meet(first.term)


@contextmanager
def live_runner(name: str, endpoint: str) -> Iterator[PlanSocket]:
    link = PlanSocket(Runner(backend(), name), endpoint, silence_s=0.5)
    thread = threading.Thread(target=link.run)
    thread.start()
    try:
        yield link
    finally:
        link.stop()
        thread.join()


def port_of(stack: LinkedStack) -> int:
    return int(stack.endpoint.rsplit(":", 1)[1])


@pytest.mark.parametrize("serving", [False, True])
def test_of_two_schedulers_that_start_at_once_exactly_one_serves(serving: bool) -> None:
    """Each has met a runner of its own; then both runners move to one of them, and then to the other.

    `serving`: both have sent plans by then; otherwise each raises its term above the other's until it has.
    """
    stacks = [LinkedStack(), LinkedStack()]
    ports = [port_of(stack) for stack in stacks]

    def until(done: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not done():
            assert time.monotonic() < deadline, "it did not connect"
            for stack in stacks:
                stack.now_s += 0.02
                stack.step()
            time.sleep(0.005)

    def running(stack: LinkedStack) -> bool:
        return bool(stack.engine.pool.schedulers)

    with (
        TcpProxy(ports[0]) as first, TcpProxy(ports[1]) as second,
        live_runner("a", first.endpoint), live_runner("b", second.endpoint),
    ):  # fmt: skip
        until(lambda: all(map(running, stacks)))
        assert [stack.link.term.number for stack in stacks] == [1, 1]
        if not serving:
            for _ in range(2):  # they swap places
                for index, proxy in enumerate((second, first)):
                    proxy.retarget(ports[index])
                until(lambda: not any(map(running, stacks)))
                until(lambda: all(map(running, stacks)))
                first, second = second, first
            assert not any(stack.engine.lifecycle.fenced for stack in stacks)
        for stack in stacks:
            stack.submit([1, 2, 3], 100, sampling=plan_pb2.Sampling(top_p=1, repetition_penalty=1))
        until(lambda: all(stack.engine.requests.totals.plans for stack in stacks))
        for port in ports:
            for proxy in (first, second):
                proxy.retarget(port)
            other = stacks[1 - ports.index(port)]
            until(lambda: other.engine.lifecycle.fenced or not running(other))  # noqa: B023
            if not other.engine.lifecycle.fenced:
                here = stacks[ports.index(port)]
                until(lambda: here.engine.lifecycle.fenced or len(here.engine.pool.schedulers) == 2)  # noqa: B023
        fenced = [stack for stack in stacks if stack.engine.lifecycle.fenced]
        assert len(fenced) == 1
        (winner,) = [stack for stack in stacks if stack not in fenced]
        for proxy in (first, second):
            proxy.retarget(port_of(winner))
        until(lambda: len(winner.engine.pool.schedulers) == 2)
        until(lambda: all(stream.end for stream in winner.requests[1].streams))
        assert len(winner.requests[1].streams[0].tokens) == 100
    for stack in stacks:
        stack.close()
