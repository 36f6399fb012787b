"""A plan that contradicts the slots is refused with the reason and changes nothing."""

from __future__ import annotations

import pytest

from roster_protos import plan_pb2
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.runner import Runner
from tests.support.plans import SAMPLE, admission, int32s, plan, sampling
from tests.support.spy_backend import SpyBackend

# Before each bad plan: slot 0 has 6 tokens in blocks 1 and 2, all computed, and one sampled token (so 7 are known).
# Slot 1 has a prompt of 5 in blocks 3 and 4, of which 2 are computed. Slots 2 and 3 are free.
FAULTS: list[tuple[str, plan_pb2.Plan]] = [
    ("releases has 3 bytes", plan_pb2.Plan(releases=b"abc")),
    ("the append columns have different lengths", plan_pb2.Plan(append_slots=int32s([0]))),
    ("the copy columns have different lengths", plan_pb2.Plan(copy_targets=int32s([1]))),
    ("the extent columns have different lengths", plan_pb2.Plan(extent_flags=b"\0")),
    ("release 0: there is no slot 4", plan(releases=[4])),
    ("release 1: there is no slot -1", plan(releases=[0, -1])),
    ("release 0: slot 1 is released twice", plan(releases=[1, 0, 1])),
    ("release 0: slot 2 has no sequence", plan(releases=[2])),
    ("slots are 0 to 3", plan(admissions=[admission(4, [1], [5])])),
    ("the slot is occupied", plan(admissions=[admission(0, [1], [5])])),
    ("the slot is occupied", plan(admissions=[admission(2, [1], [5]), admission(2, [1], [6])])),
    ("0 tokens, must be 1 to 64", plan(admissions=[admission(2, [], [5])])),
    ("65 tokens, must be 1 to 64", plan(admissions=[admission(2, [1] * 65, [5])])),
    ("tokens has 5 bytes", plan(admissions=[plan_pb2.Admission(slot=2, tokens=b"12345")])),
    ("prompt_len is 0", plan(admissions=[admission(2, [1], [5], prompt_len=0)])),
    ("prompt_len is 2", plan(admissions=[admission(2, [1], [5], prompt_len=2)])),
    ("17 blocks, must be at most 16", plan(admissions=[admission(2, [1], [5] * 17)])),
    ("there is no block 0", plan(admissions=[admission(2, [1], [5, 0])])),
    ("there is no block 21", plan(admissions=[admission(2, [1], [21])])),
    ("num_computed is 5 with 6 tokens and 1 blocks", plan(admissions=[admission(2, [1] * 6, [5], num_computed=5)])),
    ("num_computed is 3 with 3 tokens", plan(admissions=[admission(2, [1] * 3, [5], num_computed=3)])),
    (
        "bias_ids and bias_values have different lengths",
        plan(admissions=[admission(2, [1], [5], sampling=sampling(bias_ids=[1, 2], bias_values=[1]))]),
    ),
    (
        "stop_ids has 2 bytes",
        plan(admissions=[admission(2, [1], [5], sampling=plan_pb2.Sampling(stop_ids=b"12"))]),
    ),
    ("append 0: there is no slot 9", plan(appends=[(9, 0, 5)])),
    ("append 0: slot 2 has no sequence", plan(appends=[(2, 0, 5)])),
    ("append 0: slot 0 has no sequence", plan(releases=[0], appends=[(0, 2, 5)])),
    ("append 0: there is no block 0", plan(appends=[(0, 2, 0)])),
    ("append 0: there is no block 21", plan(appends=[(0, 2, 21)])),
    ("append 0: index 1 is not the table's length 2", plan(appends=[(0, 1, 5)])),
    ("append 0: index 3 is not the table's length 2", plan(appends=[(0, 3, 5)])),
    ("append 2: index 2 is not the table's length 3", plan(appends=[(0, 2, 5), (1, 2, 6), (0, 2, 7)])),
    ("append 14: index 16 is beyond the context", plan(appends=[(0, index, 5) for index in range(2, 17)])),
    ("copy source 0: there is no block 0", plan(copies=[(0, 5)])),
    ("copy target 0: there is no block 0", plan(copies=[(5, 0)])),
    ("copy target 1: there is no block 30", plan(copies=[(5, 6), (5, 30)])),
    ("copy 0: block 6 is written twice", plan(copies=[(5, 6), (4, 6)])),
    ("extent 0: there is no slot 4", plan(extents=[(4, 0, 1, 0)])),
    ("extent 0: there is no slot -2", plan(extents=[(-2, 0, 1, 0)])),
    ("extent 1: flags 5 are not supported by this runner", plan(extents=[(0, 6, 1, SAMPLE), (1, 2, 3, 5)])),
    ("extent 1: flags 2 wait for a mask without sampling", plan(extents=[(0, 6, 1, SAMPLE), (1, 2, 3, 2)])),
    ("extent 0: slot 0 has two rows", plan(extents=[(0, 6, 1, SAMPLE), (0, 7, 1, SAMPLE)])),
    ("extent 1: slot 2 has no sequence", plan(extents=[(0, 6, 1, SAMPLE), (2, 0, 1, 0)])),
    ("extent 0: slot 0 has no sequence", plan(releases=[0], extents=[(0, 6, 1, SAMPLE)])),
    ("extent 0: count 0 must be at least 1", plan(extents=[(0, 6, 0, SAMPLE)])),
    ("extent 0: count -1 must be at least 1", plan(extents=[(0, 6, -1, SAMPLE)])),
    (
        "the extents have 33 positions, must be at most 32",
        plan(admissions=[admission(2, [1] * 32, range(5, 13))], extents=[(0, 6, 1, SAMPLE), (2, 0, 32, 0)]),
    ),
    ("extent 0: start 7 is not the first uncomputed position 6", plan(extents=[(0, 7, 1, 0)])),
    ("extent 0: start 5 is not the first uncomputed position 6", plan(extents=[(0, 5, 1, 0)])),
    ("extent 0: start 2147483647 is not the first", plan(extents=[(0, 2147483647, 1, 0)])),
    ("extent 0: end 8 is beyond the 7 tokens known", plan(extents=[(0, 6, 2, 0)])),
    (
        "extent 0: end 5 is beyond the 4 positions of its blocks",
        plan(admissions=[admission(2, [1] * 5, [5])], extents=[(2, 0, 5, 0)]),
    ),
    ("extent 0: a token sampled at 4 would replace one: 5 are known", plan(extents=[(1, 2, 2, SAMPLE)])),
    (
        "extent 0: position 64 is beyond the context",
        plan(
            admissions=[admission(2, [1] * 64, range(5, 21), num_computed=40)],
            extents=[(2, 40, 24, SAMPLE)],
        ),
    ),
]


@pytest.fixture
def backend() -> SpyBackend:
    return SpyBackend()


@pytest.fixture
def runner(backend: SpyBackend) -> Runner:
    runner = Runner(backend)
    admissions = [admission(0, [1, 2, 3, 4, 5, 6], [1, 2]), admission(1, [1, 2, 3, 4, 5], [3, 4])]
    runner.execute(1, plan(admissions=admissions, extents=[(0, 0, 6, SAMPLE), (1, 0, 2, 0)]))
    backend.calls.clear()
    return runner


@pytest.mark.parametrize(("reason", "bad"), FAULTS, ids=[reason for reason, _ in FAULTS])
def test_a_bad_plan_is_refused_with_a_reason_and_changes_nothing(
    runner: Runner, backend: SpyBackend, reason: str, bad: plan_pb2.Plan
) -> None:
    before = runner.snapshot()
    # The plan also has valid changes, none of which may be applied.
    mixed = plan(admissions=[admission(3, [1, 2], [19])])
    mixed.MergeFrom(bad)
    if not bad.copy_targets and not bad.copy_sources:
        mixed.MergeFrom(plan(copies=[(18, 17)]))
    with pytest.raises(PlanFault) as fault:
        runner.execute(2, mixed)
    assert reason in str(fault.value)
    assert backend.calls == []
    assert runner.snapshot() == before
    with pytest.raises(PlanFault, match="until a new session"):
        runner.execute(2, plan(extents=[(0, 6, 1, SAMPLE)]))


def test_a_good_plan_is_accepted_in_the_same_state(runner: Runner, backend: SpyBackend) -> None:
    runner.execute(2, plan(appends=[(0, 2, 5), (1, 2, 6), (0, 3, 7)], extents=[(1, 2, 3, SAMPLE), (0, 6, 1, SAMPLE)]))
    assert backend.batches[0].tokens.tolist() == [3, 4, 5, 10]


def test_a_slot_is_checked_again_for_the_sequence_after_a_failed_one(runner: Runner, backend: SpyBackend) -> None:
    """Rows of a failed sequence are skipped unchecked; rows of the next sequence in its slot are checked."""
    hostile = admission(2, [1], [5], sampling=sampling(temperature=float("nan")))
    result = runner.execute(2, plan(admissions=[hostile], extents=[(2, 0, 1, SAMPLE)]))
    assert list(result.statuses) == [plan_pb2.ROW_STATUS_FAILED]
    calls = len(backend.batches)
    follower = plan(releases=[2], admissions=[admission(2, [1, 2], [5])], extents=[(2, 466518847, 2, 0)])
    with pytest.raises(PlanFault, match="start 466518847 is not the first uncomputed position 0"):
        runner.execute(3, follower)
    assert len(backend.batches) == calls
