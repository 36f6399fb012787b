"""Two processes with one runner id: a live holder stays, and a lost one is replaced."""

from __future__ import annotations

import pytest
import structlog
import zmq

from roster_protos import plan_pb2
from scheduler_svc.link.name_contests import ANSWER_S
from scheduler_svc.link.runner_events import GotResult, Joined, Leaving, Loss, Lost
from scheduler_svc.link.runner_link import RunnerLink
from tests.support.fake_runner import Clock, FakeRunner, await_events, join, settle

Context = zmq.Context  # type: ignore[type-arg]


@pytest.fixture
def holder(context: Context, link: RunnerLink) -> FakeRunner:
    return FakeRunner(context, link.endpoint)


@pytest.fixture
def newcomer(context: Context, link: RunnerLink) -> FakeRunner:
    return FakeRunner(context, link.endpoint)


def ping_of(runner: FakeRunner) -> int:
    message = runner.hear()
    assert message.HasField("ping")
    return message.number


def test_a_newcomer_is_refused_while_the_other_answers(
    link: RunnerLink, clock: Clock, holder: FakeRunner, newcomer: FakeRunner
) -> None:
    """However often the newcomer tries, for hours: the holder loses nothing."""
    session = join(link, holder)
    link.send_plan(session, 1, plan_pb2.Plan())
    holder.hear()
    for _ in range(5):
        newcomer.hello()
        assert settle(link) == []
        number = ping_of(holder)
        clock.now_s += ANSWER_S / 2
        holder.say(session, number, pong=plan_pb2.Pong())
        with structlog.testing.capture_logs() as logs:
            assert settle(link) == []
        reason = newcomer.hear().rejection.reason
        assert "'r'" in reason and "--runner-id" in reason
        assert [(entry["event"], entry["reason"]) for entry in logs] == [("a runner is refused", reason)]
        clock.now_s += 1
        assert settle(link) == []
        holder.say(session, ping_of(holder), pong=plan_pb2.Pong())
    holder.say(session, 1, result=plan_pb2.Result())
    assert await_events(link) == [GotResult(session, 1, plan_pb2.Result())]


def test_a_silent_one_is_replaced_in_time(
    link: RunnerLink, clock: Clock, holder: FakeRunner, newcomer: FakeRunner
) -> None:
    """Neither an answer to an earlier ping nor a result is evidence."""
    session = join(link, holder)
    link.send_plan(session, 1, plan_pb2.Plan())
    holder.hear()
    newcomer.hello()
    assert settle(link) == []
    assert link.wake_at == clock.now_s + ANSWER_S
    newcomer.hello()  # again, as nothing answers it
    holder.say(session, ping_of(holder) - 1, pong=plan_pb2.Pong())
    holder.say(session, 1, result=plan_pb2.Result())
    clock.now_s += ANSWER_S - 0.01
    assert settle(link) == [GotResult(session, 1, plan_pb2.Result())]
    clock.now_s += 0.02
    lost, joined = await_events(link, 2)
    assert isinstance(lost, Lost) and (lost.session, lost.loss) == (session, Loss.REPLACED)
    assert "--runner-id" in lost.reason
    assert isinstance(joined, Joined) and joined.session != session
    link.welcome(joined.session)
    assert newcomer.hear().HasField("welcome")
    holder.say(session, 2, pong=plan_pb2.Pong())
    assert settle(link) == [] and newcomer.hears_nothing()


def test_one_whose_connection_broke_is_replaced_at_once(
    link: RunnerLink, holder: FakeRunner, newcomer: FakeRunner
) -> None:
    session = join(link, holder)
    holder.close()
    newcomer.hello()
    lost, joined = await_events(link, 2)
    assert isinstance(lost, Lost) and (lost.session, lost.loss) == (session, Loss.GONE)
    assert isinstance(joined, Joined)


def test_the_same_process_on_another_connection_is_no_other(
    link: RunnerLink, holder: FakeRunner, newcomer: FakeRunner
) -> None:
    session = join(link, holder)
    newcomer.hello(session=session)
    lost, joined = await_events(link, 2)
    assert isinstance(lost, Lost) and lost.session == session
    assert isinstance(joined, Joined) and joined.former == session and not joined.holds


def test_two_that_come_at_once(link: RunnerLink, clock: Clock, holder: FakeRunner, newcomer: FakeRunner) -> None:
    """The first one can answer only after its Welcome."""
    holder.hello()
    newcomer.hello()
    (joined,) = await_events(link)
    assert isinstance(joined, Joined)
    link.welcome(joined.session)
    first, second = (holder, newcomer) if holder.socket.poll(500) else (newcomer, holder)
    assert first.hear().HasField("welcome")
    assert settle(link) == []
    first.say(joined.session, ping_of(first), pong=plan_pb2.Pong())
    assert settle(link) == []
    assert "--runner-id" in second.hear().rejection.reason


def test_one_that_leaves_is_waited_for(
    link: RunnerLink, clock: Clock, holder: FakeRunner, newcomer: FakeRunner
) -> None:
    """A rolling restart whose new process starts before the old one has finished its last plans."""
    session = join(link, holder)
    link.send_plan(session, 1, plan_pb2.Plan())
    holder.hear()
    holder.say(session, event=plan_pb2.Event(draining=True))
    assert await_events(link) == [Leaving(session)]
    newcomer.hello()
    clock.now_s += ANSWER_S * 1.5
    assert settle(link) == []
    holder.say(session, 1, result=plan_pb2.Result())
    assert await_events(link) == [GotResult(session, 1, plan_pb2.Result())]
    link.dismiss(session)
    (joined,) = await_events(link)
    assert isinstance(joined, Joined) and newcomer.hears_nothing()


def test_the_schedulers_own_pause_replaces_no_runner(
    link: RunnerLink, clock: Clock, holder: FakeRunner, newcomer: FakeRunner
) -> None:
    session = join(link, holder)
    newcomer.hello()
    assert settle(link) == []
    clock.now_s += 1000
    assert settle(link) == []
    holder.say(session, ping_of(holder), pong=plan_pb2.Pong())
    assert settle(link) == []
    assert newcomer.hear().HasField("rejection")
