"""Results of plans without rows are held while copies are in flight, by both executors, and nothing else waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.execution.compute_thread import ComputeThread
from runner_svc.execution.jobs import BeginSession, ExecutePlan, Executor, Stop, TakeSnapshot
from runner_svc.execution.overlapping_executor import OverlappingExecutor
from runner_svc.execution.runner import Runner
from runner_svc.interface.step import DoneStep, PendingStep, StepBatch
from runner_svc.tiers.kv_copier import Direction
from tests.support.host_world import tag
from tests.support.plans import SAMPLE, admission, int32s, ints, plan
from tests.support.stepped_copier import SteppedCopier

SESSION = 7
PATIENCE_S = 20.0


class OverlappingHash(HashBackend):
    """Computes at the launch."""

    def launch(self, batch: StepBatch) -> PendingStep:
        return DoneStep(self.step(batch))


class GatedCopier(SteppedCopier):
    """Ends tickets from the test's thread, as a copying thread does; `finish` waits for the test."""

    def end(self, direction: Direction = Direction.OFFLOAD) -> None:
        while not self.copy_block(direction):
            pass
        if self.on_done is not None:
            self.on_done()

    def finish(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.in_flight and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not self.in_flight


class Bench:
    """An executor in a session, with its copier."""

    def __init__(self, overlaps: bool, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        sizes = {"num_slots": 3, "block_size": 4, "num_blocks": 12, "context_length": 64}
        backend = (OverlappingHash if overlaps else HashBackend)(**sizes)  # type: ignore[arg-type]
        self.copier = GatedCopier(backend.cache_regions, 6)
        self.runner = Runner(backend, copier=self.copier)
        self._wake = context.socket(zmq.PULL)
        self._wake.bind("inproc://wake")
        self.executor: Executor = (
            OverlappingExecutor(self.runner) if overlaps else ComputeThread(self.runner, context, "inproc://wake")
        )
        self.executor.start()
        self.number = 0
        self.begin(SESSION)

    def begin(self, session: int, secret: bytes = b"secret") -> None:
        self.executor.session = session
        self.number = 0
        self.executor.submit(BeginSession(session, False, secret))

    def submit(self, **columns: object) -> None:
        self.number += 1
        self.executor.submit(ExecutePlan(self.executor.session, self.number, plan(**columns)))  # type: ignore[arg-type]

    def message(self) -> plan_pb2.ToScheduler:
        """Returns the next message of the executor."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.executor.look()
            if self.executor.finished:
                return self.executor.finished.popleft()
            time.sleep(0.0005)
        raise AssertionError("no message came")

    def nothing_comes(self) -> bool:
        for _ in range(20):
            self.executor.look()
            time.sleep(0.002)
        return not self.executor.finished

    def close(self) -> None:
        self.executor.submit(Stop())
        deadline = time.monotonic() + PATIENCE_S
        while self.executor.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        self._wake.close(linger=0)


@pytest.fixture(params=[False, True], ids=["thread", "overlapping"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    bench = Bench(request.param, context)
    yield bench
    bench.close()
    context.term()


def done_of(message: plan_pb2.ToScheduler) -> list[int]:
    return ints(message.result.offloads_done)


def test_the_end_of_a_copy_ends_the_wait(bench: Bench) -> None:
    bench.submit(offloads=[[(1, 1, tag(1))], [(2, 2, tag(2))]])
    assert bench.nothing_comes()
    assert bench.executor.oldest_began_at is None, "nothing computes: it is no hung plan"
    bench.copier.end()
    first = bench.message()
    assert (first.number, done_of(first)) == (1, [1])
    bench.submit()
    assert bench.nothing_comes()
    bench.copier.end()
    second = bench.message()
    assert (second.number, done_of(second)) == (2, [2])
    assert not second.result.timings.HasField("early_ns"), "it computes nothing that could be late"
    bench.submit()
    assert (bench.message().number, bench.nothing_comes()) == (3, True)


def test_the_next_plan_ends_the_wait_and_its_rows_are_computed_at_once(bench: Bench) -> None:
    bench.submit(offloads=[[(1, 1, tag(1))]])
    assert bench.nothing_comes()
    bench.submit(admissions=[admission(0, [1, 2, 3], [2])], extents=[(0, 0, 3, SAMPLE)])
    held, computed = bench.message(), bench.message()
    assert (held.number, done_of(held)) == (1, [])
    assert (computed.number, computed.result.token_counts) == (2, b"\1")
    bench.submit()
    bench.copier.end()
    assert done_of(bench.message()) == [1]


def test_a_held_result_does_not_wait_for_the_step_of_the_next_plan() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    bench, gate = Bench(False, context), threading.Event()
    backend = bench.runner._backend
    compute: Callable[[StepBatch], object] = backend.step
    backend.step = lambda batch: (gate.wait(PATIENCE_S), compute(batch))[1]  # type: ignore[method-assign, assignment]
    bench.submit(offloads=[[(1, 1, tag(1))]])
    bench.submit(admissions=[admission(0, [1, 2, 3], [2])], extents=[(0, 0, 3, SAMPLE)])
    assert bench.message().number == 1
    gate.set()
    assert bench.message().number == 2
    bench.copier.end()
    bench.close()
    context.term()


def test_a_snapshot_waits_for_the_copies_and_follows_the_held_result(bench: Bench) -> None:
    bench.submit(offloads=[[(1, 1, tag(1))]])
    assert bench.nothing_comes()
    ender = threading.Timer(0.05, bench.copier.end)
    ender.start()
    bench.executor.submit(TakeSnapshot(SESSION))
    held, snapshot = bench.message(), bench.message()
    ender.join()
    assert (held.number, done_of(held)) == (1, [1])
    assert (snapshot.snapshot.host_blocks, snapshot.snapshot.host_tags) == (int32s([1]), tag(1))


def test_a_new_session_waits_for_the_copies_and_counts_from_one(bench: Bench) -> None:
    bench.submit(offloads=[[(1, 1, tag(1))], [(2, 2, tag(2))]])
    assert bench.nothing_comes()
    ender = threading.Timer(0.05, lambda: (bench.copier.end(), bench.copier.end()))
    ender.start()
    bench.begin(SESSION + 1)
    bench.submit(loads=[[(1, 3)]])
    ender.join()
    deadline = time.monotonic() + PATIENCE_S
    while not bench.copier.in_flight and time.monotonic() < deadline:
        time.sleep(0.001)
    bench.copier.end(Direction.LOAD)
    messages = [bench.message()]
    while messages[-1].session == SESSION:
        messages.append(bench.message())
    assert (messages[-1].number, ints(messages[-1].result.loads_done), done_of(messages[-1])) == (1, [1], [])
    assert bench.runner.naming_secret == b"secret"


def test_stopping_does_not_wait_for_copies(bench: Bench) -> None:
    bench.submit(offloads=[[(1, 1, tag(1))]])
    assert bench.nothing_comes()
    bench.executor.submit(Stop())
    assert bench.message().number == 1
    bench.copier.end()


def test_an_error_of_a_copy_is_a_fault(bench: Bench) -> None:
    def fails() -> list[object]:
        raise RuntimeError("the copy failed")

    bench.submit(offloads=[[(1, 1, tag(1))]])
    assert bench.nothing_comes()
    bench.copier.take_done = fails  # type: ignore[method-assign, assignment]
    bench.copier.end()
    assert "RuntimeError: the copy failed" in bench.message().event.fault
    del bench.copier.take_done
    bench.begin(SESSION + 1)
    bench.executor.submit(TakeSnapshot(SESSION + 1))
    assert not bench.message().snapshot.host_blocks
