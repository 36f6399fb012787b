"""Sessions over real sockets: fencing, resending, silence, hangs, the scheduler's own pause."""

from __future__ import annotations

import time

import zmq

from roster_protos import plan_pb2
from scheduler_svc.link.runner_events import Fenced, GotResult, GotSnapshot, Joined, Leaving, Loss, Lost, RunnerEvent
from scheduler_svc.link.runner_link import RunnerLink
from scheduler_svc.link.terms import Term
from tests.support.fake_runner import Clock, FakeRunner, await_events, join, settle


def test_plans_go_out_and_results_of_the_session_come_in(
    context: zmq.Context,
    link: RunnerLink,  # type: ignore[type-arg]
) -> None:
    runner = FakeRunner(context, link.endpoint)
    session = join(link, runner)
    link.send_plan(session, 1, plan_pb2.Plan(extent_slots=b"abcd"))
    message = runner.hear()
    assert (message.session, message.number, message.plan.extent_slots) == (session, 1, b"abcd")
    runner.say(session + 1, 1, result=plan_pb2.Result(tokens=b"old!"))
    runner.say(session, 1, result=plan_pb2.Result(tokens=b"mine"))
    (event,) = await_events(link)
    assert event == GotResult(session, 1, plan_pb2.Result(tokens=b"mine"))


def test_a_gap_is_sent_again_and_what_was_answered_is_not(
    context: zmq.Context,
    link: RunnerLink,  # type: ignore[type-arg]
) -> None:
    runner = FakeRunner(context, link.endpoint)
    session = join(link, runner)
    for number in (1, 2, 3):
        link.send_plan(session, number, plan_pb2.Plan(releases=bytes(number)))
        runner.hear()
    runner.say(session, 1, result=plan_pb2.Result())
    runner.say(session, event=plan_pb2.Event(resend_from=1))
    await_events(link)
    settle(link)
    assert [(m.number, len(m.plan.releases)) for m in (runner.hear(), runner.hear())] == [(2, 2), (3, 3)]
    assert runner.hears_nothing()


def test_a_fault_ends_the_session(context: zmq.Context, link: RunnerLink) -> None:  # type: ignore[type-arg]
    runner = FakeRunner(context, link.endpoint)
    session = join(link, runner)
    runner.say(session, event=plan_pb2.Event(fault="slot 9"))
    assert await_events(link) == [Lost(session, "it refused a plan or failed while executing it: slot 9", Loss.FAULT)]
    link.send_plan(session, 1, plan_pb2.Plan())
    assert runner.hears_nothing()


def test_a_runner_that_leaves_may_finish(context: zmq.Context, link: RunnerLink) -> None:  # type: ignore[type-arg]
    runner = FakeRunner(context, link.endpoint)
    session = join(link, runner)
    link.send_plan(session, 1, plan_pb2.Plan())
    runner.hear()
    runner.say(session, event=plan_pb2.Event(draining=True))
    runner.say(session, 1, result=plan_pb2.Result())
    assert await_events(link, 2) == [Leaving(session), GotResult(session, 1, plan_pb2.Result())]
    runner.socket.close()
    (lost,) = await_events(link)
    assert isinstance(lost, Lost) and lost.loss is Loss.LEFT


def test_results_are_handed_on_once_and_in_order(
    context: zmq.Context,
    link: RunnerLink,  # type: ignore[type-arg]
) -> None:
    """A result that was overtaken or lost is requested by sending its plan again, which the runner answers."""
    runner = FakeRunner(context, link.endpoint)
    session = join(link, runner)
    for number in (1, 2, 3):
        link.send_plan(session, number, plan_pb2.Plan())
        runner.hear()
    runner.say(session, 2, result=plan_pb2.Result(tokens=b"two2"))
    assert settle(link) == []
    assert runner.hear().number == 1
    runner.say(session, 1, result=plan_pb2.Result(tokens=b"one1"))
    runner.say(session, 1, result=plan_pb2.Result(tokens=b"one1"))
    runner.say(session, 2, result=plan_pb2.Result(tokens=b"two2"))
    events = await_events(link, 2) + settle(link)
    assert [(e.number, e.result.tokens) for e in events if isinstance(e, GotResult)] == [(1, b"one1"), (2, b"two2")]
    assert len(events) == 2
    runner.say(session, 7, pong=plan_pb2.Pong(last_plan=3))  # it has sent the result of 3, which was lost
    settle(link)
    assert runner.hear().number == 3


def test_a_result_of_a_plan_that_was_never_sent_ends_the_session(
    context: zmq.Context,
    link: RunnerLink,  # type: ignore[type-arg]
) -> None:
    runner = FakeRunner(context, link.endpoint)
    session = join(link, runner)
    runner.say(session, 1, result=plan_pb2.Result())
    (lost,) = await_events(link)
    assert isinstance(lost, Lost) and lost.loss is Loss.UNSOUND


def test_a_runner_of_an_earlier_scheduler_is_asked_what_it_holds(
    context: zmq.Context,
    link: RunnerLink,
    clock: Clock,  # type: ignore[type-arg]
) -> None:
    runner = FakeRunner(context, link.endpoint)
    runner.say(77, 5, hello=plan_pb2.Hello(protocol_version=1, runner_id="r", term=9))
    (joined,) = await_events(link)
    assert isinstance(joined, Joined) and joined.holds and joined.former == 77
    link.resume(joined.session)
    welcome = runner.hear().welcome
    assert welcome.resume and welcome.term == link.term.number > 9
    assert runner.hear().HasField("snapshot_request")
    clock.now_s += 1.5  # the request or its answer was lost
    settle(link)
    assert runner.hear().HasField("ping") and runner.hear().HasField("snapshot_request")
    for _ in range(2):
        runner.say(joined.session, snapshot=plan_pb2.Snapshot(last_plan=3))
    assert await_events(link) + settle(link) == [GotSnapshot(joined.session, plan_pb2.Snapshot(last_plan=3))]
    # This scheduler opened the lost session, so no state is left to resume.
    runner.say(joined.session, event=plan_pb2.Event(fault="x"))
    await_events(link)
    runner.say(joined.session, hello=plan_pb2.Hello(protocol_version=1, runner_id="r", term=link.term.number))
    (again,) = await_events(link)
    assert isinstance(again, Joined) and not again.holds and again.former == joined.session


def test_once_it_has_sent_a_plan_a_later_term_fences_it(context: zmq.Context, link: RunnerLink) -> None:  # type: ignore[type-arg]
    runner = FakeRunner(context, link.endpoint)
    session = join(link, runner)
    link.send_plan(session, 1, plan_pb2.Plan())
    runner.hear()
    number = link.term.number
    runner.say(session, event=plan_pb2.Event(fenced=number, fenced_id=link.term.id))  # an old message of its own term
    assert settle(link) == []
    runner.say(session, event=plan_pb2.Event(fenced=number + 1))
    fenced, lost = await_events(link, 2)
    assert fenced == Fenced(Term(number + 1)) and isinstance(lost, Lost)
    other = FakeRunner(context, link.endpoint)
    other.say(5, hello=plan_pb2.Hello(protocol_version=1, runner_id="other", term=number + 2))
    assert await_events(link) == [Fenced(Term(number + 2))]


def test_a_runner_that_went_into_another_session_begins_anew(
    context: zmq.Context,
    link: RunnerLink,  # type: ignore[type-arg]
) -> None:
    runner = FakeRunner(context, link.endpoint)
    session = join(link, runner)
    runner.hello(session=0)  # it crossed the Welcome
    settle(link)
    assert runner.hear().HasField("welcome")
    runner.say(session, pong=plan_pb2.Pong())
    settle(link)
    runner.hello(session=4)
    lost, joined = await_events(link, 2)
    assert isinstance(lost, Lost) and lost.session == session
    assert isinstance(joined, Joined) and joined.session != session and joined.former == 4


def test_silence_and_a_plan_held_too_long_end_the_session(
    context: zmq.Context,
    link: RunnerLink,
    clock: Clock,  # type: ignore[type-arg]
) -> None:
    silent, hung = FakeRunner(context, link.endpoint), FakeRunner(context, link.endpoint)
    first, second = join(link, silent, "silent"), join(link, hung, "hung")
    link.send_plan(second, 1, plan_pb2.Plan())
    lost: list[RunnerEvent] = []
    for _ in range(25):
        clock.now_s += 1
        hung.say(second, pong=plan_pb2.Pong())
        time.sleep(0.02)
        lost += link.receive()
    reasons = {event.session: event.reason for event in lost if isinstance(event, Lost)}
    assert set(reasons) == {first, second}
    assert "silent" in reasons[first] and "owed a result" in reasons[second]
    assert silent.hear().HasField("ping")


def test_the_schedulers_own_pause_ends_no_session(
    context: zmq.Context,
    link: RunnerLink,
    clock: Clock,  # type: ignore[type-arg]
) -> None:
    runner = FakeRunner(context, link.endpoint)
    session = join(link, runner)
    link.send_plan(session, 1, plan_pb2.Plan())
    clock.now_s += 1000
    assert settle(link) == []
    runner.say(session, 1, result=plan_pb2.Result())
    assert await_events(link) == [GotResult(session, 1, plan_pb2.Result())]


def test_a_runner_that_is_gone_is_noticed_at_once(
    context: zmq.Context,
    link: RunnerLink,
    clock: Clock,  # type: ignore[type-arg]
) -> None:
    runner = FakeRunner(context, link.endpoint)
    session = join(link, runner)
    other = FakeRunner(context, link.endpoint)
    join(link, other, "other")
    runner.socket.close()
    poller = zmq.Poller()
    for socket in link.sockets:
        poller.register(socket, zmq.POLLIN)
    assert poller.poll(5000), "nothing wakes the engine"
    events = link.receive()
    while not events:  # bounded by pytest's timeout
        time.sleep(0.01)
        clock.now_s += 0.01
        events = link.receive()
    (lost,) = events
    assert isinstance(lost, Lost) and lost.session == session and lost.loss is Loss.GONE


def test_garbage_and_a_second_hello_change_nothing(
    context: zmq.Context,
    link: RunnerLink,  # type: ignore[type-arg]
) -> None:
    runner = FakeRunner(context, link.endpoint)
    session = join(link, runner)
    runner.socket.send(b"\xff\xff\xff")
    runner.socket.send_multipart([b"two", b"frames"])
    runner.hello(session=session)
    assert settle(link) == []
    assert runner.hear().HasField("ping")


def test_a_rejected_runner_hears_why(context: zmq.Context, link: RunnerLink) -> None:  # type: ignore[type-arg]
    runner = FakeRunner(context, link.endpoint)
    runner.hello()
    (joined,) = await_events(link)
    assert isinstance(joined, Joined)
    link.reject(joined.session, "another model")
    assert runner.hear().rejection.reason == "another model"
    link.welcome(joined.session)
    assert runner.hears_nothing()


def test_a_runner_is_asked_what_its_host_pool_has_kept_of_a_secrets_names(
    context: zmq.Context,
    link: RunnerLink,  # type: ignore[type-arg]
) -> None:
    runner = FakeRunner(context, link.endpoint)
    runner.hello(num_host_blocks=4)
    (event,) = await_events(link)
    assert isinstance(event, Joined)
    link.welcome(event.session, b"secret")
    welcome, request = runner.hear(), runner.hear()
    assert welcome.welcome.naming_secret == b"secret" and not welcome.welcome.resume
    assert request.HasField("snapshot_request")
    runner.say(event.session, snapshot=plan_pb2.Snapshot(host_blocks=b"abcd"))
    assert await_events(link) == [GotSnapshot(event.session, plan_pb2.Snapshot(host_blocks=b"abcd"))]
