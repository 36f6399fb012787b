"""A runner's part in moves: answers that are repeated, pulls that end with their session, short ones that overtake."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

import numpy as np

from roster_protos import plan_pb2
from runner_svc.transfer.grants import Grants
from runner_svc.transfer.mover import SHORT_PULL, Mover
from runner_svc.transfer.transport import PullFailed, PullOrder, Unreachable


class Held:
    """A transport whose pulls end when the test says so."""

    name = "held"

    def __init__(self) -> None:
        self.begun: list[PullOrder] = []
        self.may_end = threading.Event()
        self.error: Exception | None = None

    def pull(self, order: PullOrder, is_cancelled: Callable[[], bool]) -> int:
        self.begun.append(order)
        while not self.may_end.wait(0.01):
            if is_cancelled():
                raise PullFailed("cancelled")
        if self.error is not None:
            raise self.error
        return 7 * len(order.targets)


def pull_of(count: int = 1) -> plan_pb2.ToRunner:
    blocks = np.arange(1, count + 1, dtype=np.int32).tobytes()
    return plan_pb2.ToRunner(pull=plan_pb2.Pull(key=secrets.token_bytes(16), sources=blocks, targets=blocks))


def answers(mover: Mover, count: int) -> list[plan_pb2.Moved]:
    """Waits for `count` answers and returns them."""
    deadline = time.monotonic() + 10
    while len(mover.finished) < count:
        assert time.monotonic() < deadline, mover.finished
        time.sleep(0.005)
    return [mover.finished.popleft().moved for _ in range(count)]


def test_a_pull_is_carried_out_once_and_answered_each_time() -> None:
    transport = Held()
    mover = Mover(Grants(100), [transport], 100)
    mover.begin_session(5)
    message = pull_of()
    mover.take(message)
    mover.take(message)
    transport.may_end.set()
    (moved,) = answers(mover, 1)
    assert (moved.outcome, moved.num_bytes, moved.transport) == (plan_pb2.MOVE_OUTCOME_DONE, 7, "held")
    mover.take(message)
    assert answers(mover, 1) == [moved] and len(transport.begun) == 1
    mover.close()


def test_a_new_session_waits_for_the_pulls_of_the_one_before() -> None:
    transport = Held()
    mover = Mover(Grants(100), [transport], 100)
    mover.begin_session(5)
    mover.take(pull_of())
    mover.take(pull_of())
    while not transport.begun:
        time.sleep(0.005)
    mover.begin_session(6)
    assert len(transport.begun) == 1 and not mover._num_pulling, "a queued pull of an old session has begun"
    transport.may_end.set()
    mover.take(pull_of())
    (moved,) = answers(mover, 1)
    assert moved.outcome == plan_pb2.MOVE_OUTCOME_DONE
    assert len(transport.begun) == 2
    mover.close()


def test_short_pulls_do_not_wait_for_long_ones() -> None:
    transport = Held()
    mover = Mover(Grants(100), [transport], 100)
    mover.begin_session(5)
    for count in (SHORT_PULL + 1, SHORT_PULL + 1, 1):
        mover.take(pull_of(count))
    deadline = time.monotonic() + 10
    while len(transport.begun) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert sorted(len(order.targets) for order in transport.begun) == [1, SHORT_PULL + 1]
    transport.may_end.set()
    answers(mover, 3)
    mover.close()


def test_the_next_transport_is_tried_where_one_does_not_reach_the_source() -> None:
    far, near = Held(), Held()
    far.error = Unreachable("another host")
    far.may_end.set()
    near.may_end.set()
    mover = Mover(Grants(100), [far, near], 100)
    mover.begin_session(5)
    mover.take(pull_of())
    assert answers(mover, 1)[0].outcome == plan_pb2.MOVE_OUTCOME_DONE
    near.error = PullFailed("the source refuses")
    mover.take(pull_of())
    (moved,) = answers(mover, 1)
    assert (moved.outcome, moved.reason) == (plan_pb2.MOVE_OUTCOME_FAILED, "the source refuses")
    near.error = RuntimeError("a bug")
    mover.take(pull_of())
    assert answers(mover, 1)[0].reason == "RuntimeError: a bug"
    mover.close()


def test_impossible_messages_are_answered_or_ignored() -> None:
    mover = Mover(Grants(10), [Held()], 10)
    mover.begin_session(5)
    mover.take(plan_pb2.ToRunner(grant=plan_pb2.Grant(key=b"short", blocks=bytes(4))))
    mover.take(plan_pb2.ToRunner(revoke=plan_pb2.Revoke(key=b"unknown")))
    assert not mover.finished
    for sources, targets in ((b"abc", bytes(4)), (bytes(4), b""), (bytes(4), bytes(4)), (bytes(8), bytes(4))):
        mover.take(plan_pb2.ToRunner(pull=plan_pb2.Pull(key=secrets.token_bytes(16), sources=sources, targets=targets)))
        assert answers(mover, 1)[0].outcome == plan_pb2.MOVE_OUTCOME_FAILED
    mover.close()
