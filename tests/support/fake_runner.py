"""The runner's end of the link, by hand: a DEALER that says and hears exactly what a test tells it to."""

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
    """A DEALER that says what the test wants."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:  # type: ignore[type-arg]
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def close(self) -> None:
        """Dies: the connection breaks."""
        self.socket.close()

    def say(self, session: int = 0, number: int = 0, **body: object) -> None:
        """Sends a ToScheduler, e.g. `say(session, 1, result=...)`."""
        message = plan_pb2.ToScheduler(session=session, number=number, **body)  # type: ignore[arg-type]
        self.socket.send(message.SerializeToString())

    def hello(self, runner_id: str = "r", session: int = 0, **fields: Any) -> None:
        """Says hello; `fields` are of Hello."""
        self.say(session, hello=plan_pb2.Hello(protocol_version=1, runner_id=runner_id, **fields))

    def hear(self) -> plan_pb2.ToRunner:
        """The next message."""
        assert self.socket.poll(2000), "the runner hears nothing"
        return plan_pb2.ToRunner.FromString(self.socket.recv())

    def hears_nothing(self) -> bool:
        """Nothing is here, and nothing comes at once."""
        return not self.socket.poll(100)


def await_events(link: RunnerLink, count: int = 1) -> list[RunnerEvent]:
    """So many events, or a few more that came with the last one."""
    events: list[RunnerEvent] = []
    for _ in range(400):
        events += link.receive()
        if len(events) >= count:
            return events
        time.sleep(0.005)
    raise AssertionError(f"{len(events)} events of {count}")


def settle(link: RunnerLink) -> list[RunnerEvent]:
    """What comes of what was said."""
    time.sleep(0.1)
    return link.receive()


def join(link: RunnerLink, runner: FakeRunner, runner_id: str = "r", **fields: Any) -> int:
    """The runner says hello and is welcomed; returns the session."""
    runner.hello(runner_id, **fields)
    (event,) = await_events(link)
    assert isinstance(event, Joined) and event.hello.runner_id == runner_id
    link.welcome(event.session)
    welcome = runner.hear()
    assert welcome.session == event.session and welcome.HasField("welcome")
    return event.session
