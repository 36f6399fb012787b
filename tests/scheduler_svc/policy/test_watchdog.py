"""A policy that takes too long is interrupted; the interrupt is never raised outside its call."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.policy import Budget, Load, Policy, PolicyGuard, PolicyParameters
from scheduler_svc.policy.watchdog import PolicyInterrupted, PolicyTooSlow, Watchdog
from tests.support.in_process import Stack


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    watchdog = Watchdog(0.02)
    yield watchdog
    watchdog.close()


def spin(seconds: float) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    return "done"


def test_a_fast_call_gives_its_answer(watchdog: Watchdog) -> None:
    assert watchdog.call("f", lambda a, b: a + b, 2, 3) == 5
    with pytest.raises(ZeroDivisionError):
        watchdog.call("f", lambda: 1 // 0)
    assert watchdog.overruns == 0


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_a_call_that_never_ends_is_interrupted(watchdog: Watchdog, in_a_thread: bool) -> None:
    raised: list[BaseException] = []

    def call() -> None:
        try:
            watchdog.call("f", spin, 300.0)
        except BaseException as error:
            raised.append(error)

    if in_a_thread:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    else:
        call()
    assert [type(error) for error in raised] == [PolicyTooSlow]
    assert watchdog.overruns == 1
    assert watchdog.call("f", lambda: 7) == 7


def test_one_that_catches_everything_is_interrupted_again(watchdog: Watchdog) -> None:
    caught = []

    def stubborn() -> None:
        while True:
            try:
                spin(300.0)
            except BaseException as error:
                caught.append(error)
                if len(caught) == 3:
                    raise

    with pytest.raises(PolicyTooSlow):
        watchdog.call("f", stubborn)
    assert [type(error) for error in caught] == [PolicyInterrupted] * 3
    assert watchdog.overruns == 1


def test_a_call_that_hangs_in_c_is_reported_and_interrupted_when_it_is_back(watchdog: Watchdog) -> None:
    begin = time.monotonic()
    with pytest.raises(PolicyTooSlow):
        watchdog.call("f", time.sleep, 0.2)
    assert time.monotonic() - begin >= 0.2
    assert watchdog.overruns == 1


PAUSED = """
import time
from scheduler_svc.policy.watchdog import Watchdog
def work():
    print("begins", flush=True)
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    return "done"
watchdog = Watchdog(3.0)
watchdog.call("f", time.sleep, 0.2)
print(watchdog.call("f", work), watchdog.overruns, flush=True)
"""


def test_a_pause_of_the_process_is_no_slow_call() -> None:
    """The process is stopped within a call, while the watchdog is awake, for longer than the timeout."""
    with subprocess.Popen([sys.executable, "-c", PAUSED], stdout=subprocess.PIPE, text=True) as paused:
        assert paused.stdout is not None and paused.stdout.readline() == "begins\n"
        time.sleep(0.02)
        paused.send_signal(signal.SIGSTOP)
        time.sleep(4.5)
        paused.send_signal(signal.SIGCONT)
        assert paused.stdout.readline() == "done 0\n"


def test_the_interrupt_never_strikes_outside_the_call() -> None:
    """Calls end just when the watchdog checks them, and nothing is ever raised between or after them."""
    watchdog = Watchdog(0.002)
    rng = random.Random(8)
    slow = fast = 0
    until = time.monotonic() + 4
    try:
        while time.monotonic() < until:
            try:
                watchdog.call("f", spin, rng.uniform(0.0005, 0.0045))
                fast += 1
            except PolicyTooSlow:
                slow += 1
            for _ in range(rng.randrange(3000)):  # a late interrupt would be raised here
                pass
    finally:
        watchdog.close()
    for _ in range(100_000):
        pass
    assert slow > 10 and fast > 10, (slow, fast)
    assert slow <= watchdog.overruns <= slow + fast


def test_the_thread_sleeps_while_there_are_no_calls(watchdog: Watchdog) -> None:
    watchdog.call("f", spin, 0)
    deadline = time.monotonic() + 60
    while not watchdog._asleep:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(PolicyTooSlow):
        watchdog.call("f", spin, 300.0)


class Slow(Policy):
    """Hangs in every second call of `budget`."""

    name = "slow"

    def __init__(self) -> None:
        super().__init__(PolicyParameters())
        self.calls = 0

    def budget(self, load: Load) -> Budget:
        self.calls += 1
        if self.calls % 2 == 0:
            spin(300.0)
        return super().budget(load)


def test_streams_survive_a_policy_that_hangs() -> None:
    rng = random.Random(6)
    guard = PolicyGuard(Slow(), timeout_s=0.02)
    stack = Stack(guard=guard)
    stack.add_runner(
        HashBackend(num_slots=3, block_size=4, num_blocks=20, max_step_tokens=16, context_length=80, eos_probability=0)
    )
    requests = [stack.submit([rng.randrange(256)] * 7, 20) for _ in range(16)]
    stack.run(rng)
    guard.close()
    for request in requests:
        assert request.first_sequence_id is not None
        assert stack.streams[request.first_sequence_id].tokens == request.expected(0, 0)
    assert guard.overruns >= 3
    assert guard.failures >= guard.overruns - 1
    assert "took longer than 20 ms" in guard.last_failure
