"""What steps cost is measured on every backend, within its time, and leaves the runner as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.backends.hash_drafter import hash_model_drafter
from runner_svc.execution.runner import Runner
from runner_svc.interface.backend import Backend
from runner_svc.interface.step import StepBatch, StepOutput
from runner_svc.startup import step_costs
from runner_svc.startup.step_costs import Step, kept_step_costs, measured_step_costs, steps_to_measure
from runner_svc.timings.start_timings import StartTimings
from tests.support.host_backend import host_backend
from tests.support.plans import SAMPLE, admission, ints, plan
from tests.support.tiny_models import make_tiny_model


def hash_backend(num_slots: int = 8, num_blocks: int = 64) -> HashBackend:
    return HashBackend(
        num_slots=num_slots,
        block_size=16,
        num_blocks=num_blocks,
        max_step_tokens=512,
        vocab_size=300,
        context_length=2048,
    )


@pytest.fixture
def cuda(tmp_path: Path) -> Backend:
    make_tiny_model("llama", tmp_path)
    return host_backend(tmp_path, num_slots=4, block_size=8, max_step_tokens=80, num_blocks=60)


def answer(runner: Runner) -> list[int]:
    """Returns the tokens of a short prompt."""
    runner.reset()
    first = runner.execute(1, plan(admissions=[admission(0, [5, 6, 7], [3])], extents=[(0, 0, 3, SAMPLE)]))
    return ints(first.tokens) + ints(runner.execute(2, plan(extents=[(0, 3, 1, SAMPLE)])).tokens)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_all_kinds_of_steps_are_measured_and_answers_do_not_change(
    on_gpu: bool, cuda: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`on_gpu`: on the CUDA backend, with plans launched ahead."""
    monkeypatch.setattr(step_costs, "GPU_SECONDS", 60.0)
    monkeypatch.setattr(step_costs, "steps_to_measure", lambda hello: steps_to_measure(hello)[:5])
    runner = Runner(cuda if on_gpu else hash_backend())
    before = answer(runner)
    costs = measured_step_costs(runner, on_gpu)
    assert answer(runner) == before
    assert costs[0].decode_rows == 1 and not costs[0].prompt_positions
    kinds = {(bool(cost.decode_rows), bool(cost.prompt_positions)) for cost in costs}
    assert kinds == {(True, False), (False, True), (True, True)}
    assert all(cost.step_ns > 0 for cost in costs)
    runner.step_costs = costs
    assert list(runner.hello().step_costs) == costs


class Repeats:
    """Proposes the tokens of 32 positions before, except for the last `missing` ones."""

    name = "repeats"

    def __init__(self, missing: int) -> None:
        self._missing = missing

    def propose(
        self,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        counters: NDArray[np.int32],
        most: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        proposals = np.stack([tokens[s, c - 32 : c - 32 + most.max()] for s, c in zip(slots, counters, strict=True)])
        proposals[:, most.max() - self._missing :] = -1
        return proposals


@pytest.mark.parametrize("missing", [0, 1])
def test_steps_that_verify_are_measured_where_all_drafts_were_verified(missing: int) -> None:
    """A drafter that proposes less makes no cost: its step did less than the cost would say."""
    drafter = Repeats(missing)
    backend = HashBackend(num_slots=8, num_blocks=400, context_length=600, drafter=drafter, max_drafts=7)
    runner = Runner(backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_costs, "CPU_SECONDS", 60.0)
        costs = measured_step_costs(runner, on_gpu=False)
    verified = [(cost.decode_rows, cost.drafts) for cost in costs if cost.drafts]
    assert verified == ([(1, 7), (8, 7), (1, 3), (8, 3), (8, 1)] if not missing else [])
    assert (costs[0].decode_rows, costs[0].drafts) == (1, 0) and any(cost.prompt_positions for cost in costs)
    kept = kept_step_costs(StartTimings(step_costs=[[8, 2048, 0, 0, 7, 5]]))
    assert kept == [plan_pb2.StepCost(decode_rows=8, context=2048, drafts=7, step_ns=5)]


def test_a_draft_model_has_caught_up_when_it_is_measured() -> None:
    backend = HashBackend(num_slots=8, num_blocks=400, context_length=600)
    drafter = hash_model_drafter(backend)
    backend.draft_with(drafter, 7)
    passes: list[int] = []
    draw = drafter._model.draw

    def counted(batch: StepBatch) -> np.ndarray:
        passes.append(int(batch.counts.sum()))
        return draw(batch)

    drafter._model.draw = counted  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_costs, "CPU_SECONDS", 60.0)
        costs = measured_step_costs(Runner(backend), on_gpu=False)
    assert [(cost.decode_rows, cost.drafts) for cost in costs if cost.drafts] == [
        (1, 7),
        (8, 7),
        (1, 3),
        (8, 3),
        (8, 1),
    ]
    assert {count for count in passes if count > 8} == {backend.block_size + 1}  # of the block that is copied


class Slow(HashBackend):
    """Takes its time, by a clock that only it moves."""

    now_s = 0.0
    step_s = 0.0

    def step(self, batch: StepBatch) -> StepOutput:
        Slow.now_s += Slow.step_s
        return super().step(batch)

    def copy_blocks(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """A copy of a block takes as long as on a CPU with a cache that is touched for the first time."""
        Slow.now_s += 0.002 * len(targets)
        super().copy_blocks(sources, targets)


@pytest.mark.parametrize(("step_s", "count"), [(0.1, 2), (0.15, 0)])
def test_it_ends_after_its_time(step_s: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large cache takes none of the time, and decode steps alone are no measurement."""
    monkeypatch.setattr(Slow, "step_s", step_s)
    monkeypatch.setattr(Slow, "now_s", 0.0)
    monkeypatch.setattr(step_costs.time, "monotonic", lambda: Slow.now_s)
    backend = Slow(num_slots=8, block_size=16, num_blocks=999, max_step_tokens=512, vocab_size=300, context_length=2048)
    costs = measured_step_costs(Runner(backend), on_gpu=False)
    assert len(costs) == count and Slow.now_s < step_costs.CPU_SECONDS + 0.4


class Failing(HashBackend):
    def step(self, batch: StepBatch) -> StepOutput:
        raise RuntimeError("the device has had enough")


def test_a_backend_that_fails_is_not_measured() -> None:
    backend = Failing(num_slots=2, block_size=16, num_blocks=8, max_step_tokens=64, vocab_size=300, context_length=256)
    runner = Runner(backend)
    assert measured_step_costs(runner, on_gpu=False) == []
    assert runner.last_plan == 0


@pytest.mark.parametrize(("slots", "blocks", "step_tokens"), [(1, 1, 1), (1, 4, 16), (3, 8, 64), (256, 4000, 8192)])
def test_only_steps_that_fit_are_measured(slots: int, blocks: int, step_tokens: int) -> None:
    hello = plan_pb2.Hello(num_slots=slots, num_blocks=blocks, block_size=16, max_step_tokens=step_tokens)
    hello.model.context_length = 4000
    steps = steps_to_measure(hello)
    assert len(steps) == len(set(steps)) and (not steps) == (blocks == 1)
    hello.max_drafts = 15
    for step in steps + steps_to_measure(hello):
        assert (
            step.rows * (1 + step.drafts) + step.positions <= step_tokens and step.rows + bool(step.positions) <= slots
        )
        assert step.start + step.positions < 4000
    if slots == 256:
        assert {Step(1, 256), Step(256, 228), Step(64, 960, 960)} & set(steps)
