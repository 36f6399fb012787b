"""CURVE on the link: an allowed key connects, encrypted; another key, no key, or a wrong server key does not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from roster_common.curve_keys import UnusableKey, generate, read_allowed, read_secret
from roster_protos import plan_pb2
from runner_svc.link.curve import CurveClient
from scheduler_svc.link.curve import AllowList, link_server
from scheduler_svc.link.runner_link import Joined, RunnerEvent, RunnerLink

NOTHING_S = 0.5


class Keys:
    """Key files of a scheduler and two runners; only the first is allowed."""

    def __init__(self, folder: Path) -> None:
        self.scheduler, self.scheduler_public = generate(folder, "scheduler")
        self.allowed, allowed_public = generate(folder, "allowed")
        self.stranger, self.stranger_public = generate(folder, "stranger")
        self.list = folder / "runners"
        self.list.write_text(f"# runners\n\n{allowed_public.read_text()}")


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def link(keys: Keys) -> Iterator[RunnerLink]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    curve = link_server(context, keys.scheduler, keys.list)
    link = RunnerLink(context, "tcp://127.0.0.1:*", silence_s=60, plan_timeout_s=60, clock=time.monotonic, curve=curve)
    yield link
    link.close()
    context.term()  # ends the ZAP thread too, or this test hangs


def knock(link: RunnerLink, curve: CurveClient | None, wait_s: float) -> list[RunnerEvent]:
    """Returns the events of a runner with these keys within `wait_s`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if curve is not None:
        curve.protect(socket)
    socket.connect(link.endpoint)
    hello = plan_pb2.Hello(runner_id="r", protocol_version=1)
    socket.send(plan_pb2.ToScheduler(hello=hello).SerializeToString())
    events: list[RunnerEvent] = []
    deadline = time.monotonic() + wait_s
    while not events and time.monotonic() < deadline:
        link.sockets[0].poll(20)
        events += link.receive()
    socket.close()
    context.term()
    return events


def test_an_allowed_key_gets_in(link: RunnerLink, keys: Keys) -> None:
    (event,) = knock(link, CurveClient.read(keys.allowed, keys.scheduler_public), 20)
    assert isinstance(event, Joined) and event.hello.runner_id == "r"


def test_strangers_do_not(link: RunnerLink, keys: Keys) -> None:
    assert knock(link, CurveClient.read(keys.stranger, keys.scheduler_public), NOTHING_S) == []
    assert knock(link, None, NOTHING_S) == []
    # A runner that has another server's key sends nothing to this one.
    assert knock(link, CurveClient.read(keys.allowed, keys.stranger_public), NOTHING_S) == []


def test_the_list_is_read_again(link: RunnerLink, keys: Keys) -> None:
    stranger = CurveClient.read(keys.stranger, keys.scheduler_public)
    assert knock(link, stranger, NOTHING_S) == []
    keys.list.write_text(keys.stranger_public.read_text())
    assert len(knock(link, stranger, 20)) == 1
    assert knock(link, CurveClient.read(keys.allowed, keys.scheduler_public), NOTHING_S) == []


def test_a_list_that_breaks_leaves_the_last_one(keys: Keys) -> None:
    allowed = AllowList(keys.list)
    (key,) = read_allowed(keys.list)
    keys.list.write_text("nonsense\n")
    assert key in allowed
    keys.list.unlink()
    assert key in allowed


def test_key_files(tmp_path: Path, keys: Keys) -> None:
    assert keys.scheduler.stat().st_mode & 0o777 == 0o600
    assert zmq.curve_public(read_secret(keys.scheduler)) in read_allowed(keys.scheduler_public)
    with pytest.raises(FileExistsError, match="choose another name"):
        generate(tmp_path, "scheduler")
    for text in ("", "short\n", f"{'x' * 39}\n", f"{'é' * 40}\n"):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(UnusableKey):
            read_secret(tmp_path / "bad")
        with pytest.raises(UnusableKey):
            CurveClient.read(tmp_path / "bad", keys.scheduler_public)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(UnusableKey, match="can't be read"):
            read_allowed(missing)
