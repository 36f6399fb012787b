"""Recording runner: what it records, and that its records leave no cycles to the garbage collector."""

from __future__ import annotations

from bench.gpu_serving.recording_runner import RecordingSocket
from bench.gpu_serving.step_record import StepRecord
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.execution.runner import Runner
from tests.support.garbage import circles_left_by, in_own_process
from tests.support.linked_runner import BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, PLANS, linked_runner


def recorded(records: list[list[int]]) -> int:
    """Returns the reference cycles that three generations of sequences left."""
    backend = HashBackend(num_slots=NUM_SLOTS, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_step_tokens=64)

    def recording_link(runner: Runner, endpoint: str) -> RecordingSocket:
        return RecordingSocket(runner, endpoint, 30.0, None, 60.0, records)

    with linked_runner(backend, recording_link) as runner:
        runner.generations(2)
        return circles_left_by(lambda: runner.generations(3))


def test_steps_leave_no_circles() -> None:
    """A garbage collection stops the runner, and would be measured as the runner's time."""
    assert in_own_process("recorded([])", __name__) == "0"


def test_each_plan_has_its_times_in_order() -> None:
    records: list[list[int]] = []
    recorded(records)
    steps = StepRecord.of(records)
    assert len(steps.rows) == len(records) == 5 * PLANS
    assert steps.rows.tolist() == [NUM_SLOTS] * len(records)
    for record in records:
        times = record[4:9]  # received, launching, launched, done, sent
        assert times == sorted(times)
