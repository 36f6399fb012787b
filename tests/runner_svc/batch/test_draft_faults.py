"""Rows without start and drafts that contradict the slots are refused with the reason, and change nothing."""

from __future__ import annotations

import random

import pytest

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.backends.null_backend import NullBackend
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.plans_in_flight import LaunchedPlan
from runner_svc.execution.runner import Runner
from tests.support.drafters import LateHash, drafting_backend
from tests.support.plans import AWAIT, SAMPLE, admission, plan

# Before each bad plan: slot 0 has 13 tokens in 4 blocks. Slot 1 has a prompt of 5, of which 2 are computed. Slot 2 has
# 4 tokens and a row with 2 drafts in flight, so 5 to 7. Slot 3 has 8 tokens in 2 blocks.
FAULTS: list[tuple[str, plan_pb2.Plan]] = [
    ("the extent columns have different lengths: [1, 2]", plan(extents=[(0, -1, 1, SAMPLE)], drafts=[0, 0])),
    ("extent 1: 4 drafts, must be at most 3", plan(extents=[(2, -1, 1, SAMPLE), (0, -1, 5, SAMPLE)], drafts=[0, 4])),
    ("extent 0: start 12 with 2 drafts, must be -1", plan(extents=[(0, 12, 3, SAMPLE)], drafts=[2])),
    ("extent 0: count 2 must be 1 plus the row's 2 drafts", plan(extents=[(0, -1, 2, SAMPLE)], drafts=[2])),
    ("extent 0: count 2 must be 1 plus the row's 0 drafts", plan(extents=[(0, -1, 2, SAMPLE)])),
    ("extent 0: flags 0 of a row without start, must be 1", plan(extents=[(0, -1, 1, 0)])),
    ("extent 0: flags 3 of a row without start, must be 1", plan(extents=[(0, -1, 2, AWAIT)], drafts=[1])),
    ("extent 0: start -1 in mid-prompt: 2 of 5 computed", plan(extents=[(1, -1, 1, SAMPLE)])),
    (
        "extent 0: start 4 must be -1: the sequence has up to 2 tokens more than are known",
        plan(extents=[(2, 4, 1, SAMPLE)]),
    ),
    ("extent 0: start 6 must be -1: the sequence", plan(extents=[(2, 6, 1, SAMPLE)])),
    ("extent 0: start -2 is not the first uncomputed position 12", plan(extents=[(0, -2, 1, SAMPLE)])),
    ("extent 0: end 9 is beyond the 8 positions of its blocks", plan(extents=[(3, -1, 2, SAMPLE)], drafts=[1])),
    # The upper bound counts: 7 tokens and 2 drafts.
    ("extent 0: end 9 is beyond the 8 positions of its blocks", plan(extents=[(2, -1, 3, SAMPLE)], drafts=[2])),
    ("extent 0: position 16 is beyond the context", plan(extents=[(0, -1, 4, SAMPLE)], drafts=[3])),
    (
        "the extents have 9 positions, must be at most 8",
        plan(extents=[(0, -1, 3, SAMPLE), (2, -1, 2, SAMPLE), (1, 2, 3, 0), (3, -1, 1, SAMPLE)], drafts=[2, 1, 0, 0]),
    ),
]


def make_runner(kind: type[HashBackend]) -> tuple[Runner, LaunchedPlan]:
    """Returns the runner in this state, and the plan whose result is not taken."""
    backend = drafting_backend(
        kind,
        random.Random(1),
        wrong=1.0,
        lies=False,
        max_drafts=3,
        num_slots=4,
        block_size=4,
        num_blocks=20,
        max_step_tokens=8,
        context_length=16,
        eos_probability=0,
    )
    runner = Runner(backend)
    lengths = {0: (12, [1, 2, 3, 4]), 1: (5, [5, 6]), 2: (3, [7, 8]), 3: (7, [9, 10])}
    admissions = [
        admission(slot, range(1, 1 + length), blocks, num_computed=length - 1 if slot != 1 else 0)
        for slot, (length, blocks) in lengths.items()
    ]
    ready = [(slot, lengths[slot][0] - 1, 1, SAMPLE) for slot in (0, 2, 3)]
    runner.execute(1, plan(admissions=admissions, extents=[*ready, (1, 0, 2, 0)]))
    return runner, runner.launch(2, plan(extents=[(2, -1, 3, SAMPLE)], drafts=[2]))


@pytest.mark.parametrize(("reason", "bad"), FAULTS, ids=[reason for reason, _ in FAULTS])
def test_a_bad_row_is_refused_with_a_reason_and_changes_nothing(reason: str, bad: plan_pb2.Plan) -> None:
    runner, launched = make_runner(LateHash)
    before = runner._state._counters.copy()
    bad.MergeFrom(plan(copies=[(18, 17)], appends=[(1, 2, 19)]))
    with pytest.raises(PlanFault) as fault:
        runner.launch(3, bad)
    assert reason in str(fault.value)
    for name in ("computed", "num_tokens", "num_blocks", "spread", "recorded"):
        assert getattr(before, name).tolist() == getattr(runner._state._counters, name).tolist()
    assert launched.wait().token_counts == b"\1"


@pytest.mark.parametrize(
    "good",
    [
        plan(extents=[(0, -1, 3, SAMPLE), (2, -1, 2, SAMPLE), (1, 2, 2, 0)], drafts=[2, 1, 0]),
        plan(extents=[(0, 12, 1, SAMPLE), (3, -1, 1, SAMPLE), (2, -1, 1, SAMPLE)]),
        plan(appends=[(3, 2, 11)], extents=[(3, -1, 4, SAMPLE)], drafts=[3]),
    ],
)
def test_rows_within_their_bounds_are_accepted(good: plan_pb2.Plan) -> None:
    runner, _ = make_runner(LateHash)
    drafts = good.extent_drafts or bytes(3)
    assert list(runner.launch(3, good).wait().drafted or bytes(3)) == list(drafts)


def test_once_the_drafts_are_recorded_a_row_may_have_a_start_again() -> None:
    runner, launched = make_runner(LateHash)
    assert launched.wait().token_counts == b"\1"  # all drafts were wrong
    assert runner.execute(3, plan(extents=[(2, 4, 1, SAMPLE)])).token_counts == b"\1"


def test_plans_that_repeat_the_last_one_are_refused_beyond_the_context() -> None:
    """The blocks have a position more than a run may reach."""
    runner, _ = make_runner(LateHash)
    runner.reset()
    runner.launch(
        1, plan(admissions=[admission(0, [1] * 10, [1, 2, 3, 4], num_computed=9)], extents=[(0, 9, 1, SAMPLE)])
    )
    for number in (2, 3):
        runner.launch(number, plan(extents=[(0, -1, 2, SAMPLE)], drafts=[1]))
    with pytest.raises(PlanFault, match="position 16 is beyond the context"):
        runner.launch(4, plan(extents=[(0, -1, 2, SAMPLE)], drafts=[1]))


@pytest.mark.parametrize("backend", [HashBackend(), NullBackend()])
@pytest.mark.parametrize("drafts", [[], [1]])
def test_a_runner_without_drafter_refuses_both(backend: HashBackend | NullBackend, drafts: list[int]) -> None:
    runner = Runner(backend)
    hello = runner.hello()
    assert (hello.max_drafts, hello.drafter) == (0, "")
    runner.execute(1, plan(admissions=[admission(0, [1, 2], [1])], extents=[(0, 0, 2, SAMPLE)]))
    with pytest.raises(PlanFault, match="a row needs a start, and no drafts: there is no drafter"):
        runner.execute(2, plan(extents=[(0, -1, 1 + sum(drafts), SAMPLE)], drafts=drafts))
