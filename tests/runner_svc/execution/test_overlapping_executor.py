"""The executor that launches in the socket's thread: order, results, sessions, faults."""

from __future__ import annotations

import time

import numpy as np
import pytest

from roster_protos import plan_pb2
from runner_svc.execution.jobs import BeginSession, ExecutePlan, Stop, TakeSnapshot
from runner_svc.execution.overlapping_executor import OverlappingExecutor
from runner_svc.execution.runner import Runner
from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.step import StepBatch, StepOutput
from tests.support.plans import SAMPLE, admission, plan
from tests.support.spy_backend import SpyBackend

SESSION = 7


class Pending:
    """A step that is done once the test sets `is_done` or `wait` is called."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output
        self.masked_rows = output.masked_rows
        self.is_done = False

    def done(self) -> bool:
        return self.is_done

    def wait(self) -> StepOutput:
        self.is_done = True
        return self._output


class OverlappingSpy(SpyBackend):
    """Backend whose steps remain in flight until the test ends them."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Pending] = []

    def change_slots(self, changes: SlotChanges) -> None:
        """Does nothing: no slots are kept."""

    def launch(self, batch: StepBatch) -> Pending:
        self.pending.append(Pending(self.step(batch)))
        return self.pending[-1]


@pytest.fixture
def backend() -> OverlappingSpy:
    return OverlappingSpy()


@pytest.fixture
def executor(backend: OverlappingSpy) -> OverlappingExecutor:
    executor = OverlappingExecutor(Runner(backend))
    executor.start()
    executor.session = SESSION
    executor.submit(BeginSession(SESSION, resume=False))
    return executor


def submit_steps(executor: OverlappingExecutor, count: int) -> None:
    """Submits `count` plans that decode one sequence with a prompt of three tokens."""
    for number in range(1, count + 1):
        if number == 1:
            step = plan(admissions=[admission(0, [1, 2, 3], [1, 2, 3, 4])], extents=[(0, 0, 3, SAMPLE)])
        else:
            step = plan(extents=[(0, number + 1, 1, SAMPLE)])
        executor.submit(ExecutePlan(SESSION, number, step))


def numbers(executor: OverlappingExecutor) -> list[int]:
    taken = [message.number for message in executor.finished]
    executor.finished.clear()
    return taken


def test_results_come_when_their_step_is_done_and_in_order(
    executor: OverlappingExecutor, backend: OverlappingSpy
) -> None:
    submit_steps(executor, 2)
    assert len(backend.pending) == 2, "the second is launched while the first is in flight"
    assert executor.look() and not executor.finished
    backend.pending[1].is_done = True
    assert executor.look() and not executor.finished, "not before the first"
    backend.pending[0].is_done = True
    assert not executor.look()
    assert numbers(executor) == [1, 2]


def test_more_plans_than_may_be_under_way_wait_for_the_oldest(
    executor: OverlappingExecutor, backend: OverlappingSpy
) -> None:
    submit_steps(executor, 4)
    assert numbers(executor) == [1]
    assert [pending.is_done for pending in backend.pending] == [True, False, False, False]


def test_results_tell_how_early_their_plan_was(executor: OverlappingExecutor, backend: OverlappingSpy) -> None:
    submit_steps(executor, 2)
    time.sleep(0.02)
    for pending in backend.pending:
        pending.is_done = True
    executor.look()
    time.sleep(0.02)
    executor.submit(ExecutePlan(SESSION, 3, plan(extents=[(0, 4, 1, SAMPLE)])))
    backend.pending[2].is_done = True
    executor.look()
    first, second, third = (message.result.timings for message in executor.finished)
    assert not first.HasField("early_ns"), "no plan was before it"
    assert second.early_ns >= 0.02e9 - second.idle_ns
    assert third.early_ns == -third.idle_ns <= -0.02e9


def test_a_new_session_waits_for_the_old_ones_plans(executor: OverlappingExecutor, backend: OverlappingSpy) -> None:
    submit_steps(executor, 2)
    executor.submit(BeginSession(SESSION + 1, resume=False))
    assert all(pending.is_done for pending in backend.pending)
    assert [message.session for message in executor.finished] == [SESSION, SESSION]
    executor.finished.clear()
    executor.submit(TakeSnapshot(SESSION + 1))
    (message,) = executor.finished
    assert message.snapshot == plan_pb2.Snapshot(last_plan=0)


def test_a_snapshot_holds_what_the_plans_before_it_sampled(executor: OverlappingExecutor) -> None:
    submit_steps(executor, 2)
    executor.submit(TakeSnapshot(SESSION))
    assert [message.WhichOneof("body") for message in executor.finished] == ["result", "result", "snapshot"]
    (sequence,) = executor.finished[-1].snapshot.sequences
    assert np.frombuffer(sequence.tokens, "<i4").tolist() == [1, 2, 3, 10, 10]


def test_a_fault_comes_behind_the_results_before_it(executor: OverlappingExecutor) -> None:
    submit_steps(executor, 1)
    executor.submit(ExecutePlan(SESSION, 5, plan()))
    result, fault = executor.finished
    assert result.number == 1 and result.HasField("result")
    assert "can't follow" in fault.event.fault
    assert not executor.look()


def test_stopping_finishes_what_is_under_way(executor: OverlappingExecutor) -> None:
    submit_steps(executor, 2)
    assert executor.is_alive()
    executor.submit(Stop())
    assert numbers(executor) == [1, 2] and not executor.is_alive()
