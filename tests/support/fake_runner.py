"""The runner's end of the link, controlled by a test: a DEALER socket."""

from __future__ import annotations

import time
from typing import Any

import zmq

from roster_protos import plan_pb2
from scheduler_svc.link.runner_events import Joined, RunnerEvent
from scheduler_svc.link.runner_link import RunnerLink


class Clock:
    """A test's time, in seconds."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FakeRunner:
    """A DEALER socket that sends a test's messages."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:  # type: ignore[type-arg]
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def close(self) -> None:
        """Closes the socket as a dying runner does: the connection breaks."""
        self.socket.close()

    def say(self, session: int = 0, number: int = 0, **body: object) -> None:
        """Sends a ToScheduler, e.g. `say(session, 1, result=...)`."""
        message = plan_pb2.ToScheduler(session=session, number=number, **body)  # type: ignore[arg-type]
        self.socket.send(message.SerializeToString())

    def hello(self, runner_id: str = "r", session: int = 0, **fields: Any) -> None:
        """Sends a Hello; `fields` are of Hello."""
        self.say(session, hello=plan_pb2.Hello(protocol_version=1, runner_id=runner_id, **fields))

    def hear(self) -> plan_pb2.ToRunner:
        """Returns the next message."""
        assert self.socket.poll(2000), "no message for the runner"
        return plan_pb2.ToRunner.FromString(self.socket.recv())

    def hears_nothing(self) -> bool:
        """Whether no message arrives within 0.1 s."""
        return not self.socket.poll(100)


def await_events(link: RunnerLink, count: int = 1) -> list[RunnerEvent]:
    """Returns at least `count` events, including those that arrive with the last."""
    events: list[RunnerEvent] = []
    for _ in range(400):
        events += link.receive()
        if len(events) >= count:
            return events
        time.sleep(0.005)
    raise AssertionError(f"{len(events)} events of {count}")


def settle(link: RunnerLink) -> list[RunnerEvent]:
    """Returns the events of the next 0.1 s."""
    time.sleep(0.1)
    return link.receive()


def join(link: RunnerLink, runner: FakeRunner, runner_id: str = "r", **fields: Any) -> int:
    """Sends the runner's Hello and welcomes it; returns the session."""
    runner.hello(runner_id, **fields)
    (event,) = await_events(link)
    assert isinstance(event, Joined) and event.hello.runner_id == runner_id
    link.welcome(event.session)
    welcome = runner.hear()
    assert welcome.session == event.session and welcome.HasField("welcome")
    return event.session
